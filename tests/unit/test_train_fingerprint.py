"""What decides the bits is written down, and a difference is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.errors import CheckpointError
from gradsync.sync.engine.leaf_tree import TREE_VERSION
from gradsync.train.config import TrainConfig
from gradsync.train.state import Fingerprint, compare, numeric_fingerprint
from gradsync.world import World

CONFIG = TrainConfig(
    tokens_per_update=4096, micro_batch_size=4, seq_len=128, dtype="fp32", sync="ddp"
)
MACHINE = ("torch", "device", "cpu_capability", "math_env", "threads", "tf32")
REQUESTED = ("dtype", "sync", "compile", "loss_rows", "leaf_shape", "num_leaves")


def fingerprint(config: TrainConfig = CONFIG, ranks: int = 2, **changes: Any) -> Fingerprint:
    world = World(world_size=ranks, local_world_size=ranks, **changes)
    return numeric_fingerprint(config, world, config.batch_plan(ranks), threads=3)


def test_what_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    assert fingerprint() == {
        "torch": torch.__version__,
        "device": "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "math_env": "",
        "threads": 3,
        "tf32": False,  # means nothing on a CPU
        "dtype": "fp32",
        "sync": "ddp",
        "compile": "none",
        "loss_rows": None,
        "leaf_shape": "4x128",
        "num_leaves": 8,
        "world_size": 2,
    }


def test_variables_that_change_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert fingerprint()["math_env"] == "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default"


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", {"cuda:1": "a big one"}.__getitem__)
    on_gpu = fingerprint(device="cuda:1")
    assert (on_gpu["device"], on_gpu["tf32"]) == ("a big one", True)
    assert fingerprint(replace(CONFIG, tf32=False), device="cuda:1")["tf32"] is False


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dtype": "bf16"}, "dtype"),
        ({"sync": "naive"}, "sync"),
        ({"compile": "model"}, "compile"),
        ({"loss_rows": 64}, "loss_rows"),
        ({"micro_batch_size": 2}, "leaf_shape"),
        ({"seq_len": 64}, "leaf_shape"),
        ({"tokens_per_update": 8192}, "num_leaves"),
    ],
)
def test_a_setting_shows(changes: dict[str, Any], name: str) -> None:
    assert fingerprint(replace(CONFIG, **changes))[name] != fingerprint()[name]


def test_ranks_of_one_run_agree() -> None:
    worlds = [
        World(rank=rank, world_size=2, local_rank=rank, local_world_size=2) for rank in (0, 1)
    ]
    plan = CONFIG.batch_plan(2)
    first, second = (numeric_fingerprint(CONFIG, world, plan, threads=3) for world in worlds)
    assert first == second


# -- comparing ------------------------------------------------------------------------------------


def test_all_fields_are_covered_here() -> None:
    assert set(fingerprint()) == {*MACHINE, *REQUESTED, "world_size"}


def test_the_same_numerics() -> None:
    assert compare(fingerprint(), fingerprint(), allow_change=False) == []
    assert (
        compare(fingerprint() | {"of a later version": 1}, fingerprint(), allow_change=False) == []
    )


@pytest.mark.parametrize("name", [*MACHINE, *REQUESTED])
def test_each_difference_is_refused(name: str) -> None:
    now = fingerprint()
    saved = now | {name: "other"}
    with pytest.raises(CheckpointError) as caught:
        compare(saved, now, allow_change=False)
    difference = f"{name}: 'other' then, {now[name]!r} now"
    assert difference in str(caught.value)
    assert "--allow-numeric-change" in str(caught.value)
    assert compare(saved, now, allow_change=True) == [difference]


def test_a_field_that_was_not_saved_is_a_difference() -> None:
    saved = {name: value for name, value in fingerprint().items() if name != "threads"}
    with pytest.raises(CheckpointError, match="threads: None then, 3 now"):
        compare(saved, fingerprint(), allow_change=False)


def test_all_differences_are_named_at_once() -> None:
    saved = fingerprint() | {"dtype": "bf16", "threads": 7}
    with pytest.raises(CheckpointError, match=r"threads: 7 then, 3 now; dtype: 'bf16' then"):
        compare(saved, fingerprint(), allow_change=False)


def test_another_world_size_promises_samples_not_bits() -> None:
    now = fingerprint()
    assert compare(fingerprint(ranks=4), now, allow_change=False) == ["world_size: 4 then, 2 now"]
    machine = dict.fromkeys(MACHINE, "other")
    notes = compare(fingerprint(ranks=4) | machine, now, allow_change=False)
    assert len(notes) == 1 + len(MACHINE)


@pytest.mark.parametrize("name", REQUESTED)
def test_another_world_size_excuses_no_setting(name: str) -> None:
    saved = fingerprint(ranks=4) | {name: "other"}
    with pytest.raises(CheckpointError, match=f"{name}: 'other' then") as caught:
        compare(saved, fingerprint(), allow_change=False)
    assert "world_size" not in str(caught.value)  # which is no reason to refuse


def test_under_the_invariant_order_the_world_size_does_not_appear() -> None:
    config = replace(CONFIG, sync="invariant")
    assert fingerprint(config, ranks=4) == fingerprint(config, ranks=2)
    assert fingerprint(config)["sync"] == f"invariant tree {TREE_VERSION}"
    with pytest.raises(CheckpointError, match="threads: 7 then, 3 now"):
        compare(
            fingerprint(config, ranks=4) | {"threads": 7}, fingerprint(config), allow_change=False
        )


def test_leaving_the_invariant_order_is_a_difference() -> None:
    saved = fingerprint(replace(CONFIG, sync="invariant"), ranks=4)
    with pytest.raises(CheckpointError, match=f"sync: 'invariant tree {TREE_VERSION}' then, 'ddp'"):
        compare(saved, fingerprint(), allow_change=False)
