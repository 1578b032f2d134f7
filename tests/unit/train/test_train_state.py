"""Settings that decide the bits are saved, and a difference is refused by name; what a strategy
remembered is taken up by the same strategy only."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from gradsync.checkpoint.store import Snapshot
from gradsync.commands.train.config import (
    CheckpointConfig,
    EvalConfig,
    OptimConfig,
    SyncConfig,
    TrainConfig,
)
from gradsync.commands.train.learner import Fingerprint
from gradsync.commands.train.state import (
    changed_settings,
    compare,
    numeric_fingerprint,
    take_strategy_state,
)
from gradsync.errors import ConfigError
from gradsync.sync.buckets import TREE_VERSION
from gradsync.world import World

CONFIG = TrainConfig(
    tokens_per_update=4096, micro_batch_size=4, seq_len=128, dtype="fp32", sync="ddp"
)
MACHINE = ("torch", "device", "cpu_capability", "math_env", "threads", "tf32")
REQUESTED = ("dtype", "sync", "compile", "leaf_shape", "num_leaves")
TREE = f"invariant tree {TREE_VERSION}"


def fingerprint(config: TrainConfig = CONFIG, ranks: int = 2, **changes: Any) -> Fingerprint:
    world = World(world_size=ranks, local_world_size=ranks, **changes)
    return numeric_fingerprint(config, world, config.batch_plan(ranks), threads=3)


def test_what_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    expected = {
        "torch": torch.__version__,
        "device": "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "math_env": "",
        "threads": 3,
        "tf32": False,  # means nothing on a CPU
        "dtype": "fp32",
        "sync": "ddp",
        "compile": "none",
        "leaf_shape": "4x128",
        "num_leaves": 8,
        "world_size": 2,
    }
    assert fingerprint() == expected
    assert fingerprint(rank=1, local_rank=1) == expected
    assert set(expected) == {*MACHINE, *REQUESTED, "world_size"}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert fingerprint()["math_env"] == "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default"
    monkeypatch.setattr(
        torch.cuda, "get_device_name", {torch.device("cuda:1"): "a big one"}.__getitem__
    )
    on_gpu = fingerprint(device_name="cuda:1")
    assert (on_gpu["device"], on_gpu["tf32"]) == ("a big one", True)
    assert fingerprint(replace(CONFIG, tf32=False), device_name="cuda:1")["tf32"] is False


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dtype": "bf16"}, "dtype"),
        ({"sync": "naive"}, "sync"),
        ({"compile": "model"}, "compile"),
        ({"micro_batch_size": 2}, "leaf_shape"),
        ({"seq_len": 64}, "leaf_shape"),
        ({"tokens_per_update": 8192}, "num_leaves"),
    ],
)
def test_a_setting_shows(changes: dict[str, Any], name: str) -> None:
    assert fingerprint(replace(CONFIG, **changes))[name] != fingerprint()[name]


def refusal(saved: dict[str, Any], now: Fingerprint | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compare(saved, now or fingerprint(), allow_change=False)
    return str(caught.value)


@pytest.mark.parametrize("name", [*MACHINE, *REQUESTED])
def test_each_difference_is_refused(name: str) -> None:
    now = fingerprint()
    saved = now | {name: "other"}
    difference = f"{name}: 'other' then, {now[name]!r} now"
    assert difference in refusal(saved)
    assert "--allow-numeric-change" in refusal(saved)
    assert compare(saved, now, allow_change=True) == [difference]
    if name in REQUESTED:  # another world size is no excuse, nor a reason to refuse
        elsewhere = refusal(fingerprint(ranks=4) | {name: "other"})
        assert f"{name}: 'other' then" in elsewhere
        assert "world_size" not in elsewhere


def test_all_differences_are_named_at_once_and_what_was_not_saved_is_one() -> None:
    saved = fingerprint() | {"dtype": "bf16", "threads": 7}
    del saved["tf32"]
    for words in ("threads: 7 then, 3 now; ", "tf32: None then", "dtype: 'bf16' then"):
        assert words in refusal(saved)


def test_another_world_size_promises_samples_not_bits() -> None:
    now = fingerprint()
    assert compare(fingerprint(ranks=4), now, allow_change=False) == ["world_size: 4 then, 2 now"]
    machine = dict.fromkeys(MACHINE, "other")
    notes = compare(fingerprint(ranks=4) | machine, now, allow_change=False)
    assert len(notes) == 1 + len(MACHINE)


def test_under_the_invariant_order_the_world_size_does_not_appear() -> None:
    config = replace(CONFIG, sync="invariant")
    now = fingerprint(config)
    assert fingerprint(config, ranks=4) == now
    assert now["sync"] == TREE
    assert "threads: 7 then, 3 now" in refusal(fingerprint(config, ranks=4) | {"threads": 7}, now)
    assert f"sync: {TREE!r} then, 'ddp'" in refusal(fingerprint(config, ranks=4))


MOMENTUM = {"outer_momentum/a": torch.zeros(2), "outer_momentum/b": torch.zeros(1)}
LEFT = "diloco's outer momentum is left behind: the run goes on with invariant"


@pytest.mark.parametrize(
    ("state", "tensors", "sync", "expected"),
    [
        ({"config": {"sync": "diloco"}}, MOMENTUM, "diloco", (MOMENTUM, [])),
        ({"config": {"sync": "diloco"}}, MOMENTUM, "invariant", ({}, [LEFT])),
        ({"config": {"sync": "diloco"}}, {}, "invariant", ({}, [])),
        ({}, MOMENTUM, "diloco", (MOMENTUM, [])),  # a checkpoint that does not say
        ({"config": {}}, MOMENTUM, "diloco", (MOMENTUM, [])),
    ],
)
def test_what_a_strategy_remembered(
    state: dict[str, Any], tensors: Any, sync: str, expected: Any
) -> None:
    found = Snapshot(step=3, tensors={"sync": tensors}, state=state)
    assert take_strategy_state(found, sync) == expected
    assert take_strategy_state(Snapshot(step=3, tensors={}, state=state), sync) == ({}, [])


def test_changed_settings_are_named() -> None:
    saved = asdict(TrainConfig())
    assert changed_settings(saved, TrainConfig(out="x", log_every=1, micro_batch_size=1)) == []
    assert changed_settings({}, TrainConfig()) == []
    now = TrainConfig(steps=9, optim=OptimConfig(lr=1e-3), sync_options=SyncConfig(bucket_mb=5.0))
    (line,) = changed_settings(saved, now)
    assert line == (
        "resuming with changed settings: optim.lr 0.0006 -> 0.001, sync_options.bucket_mb None -> "
        "5.0, steps 1000 -> 9 (learning rates follow)"
    )
    constant = TrainConfig(steps=9, optim=OptimConfig(schedule="constant"))
    assert "steps" not in changed_settings(saved, constant)[0]


@pytest.mark.parametrize(("sync", "told"), [("local_sgd", True), ("diloco", True), ("ddp", False)])
def test_what_ends_a_round_belongs_to_a_run_that_has_rounds(sync: str, told: bool) -> None:
    saved = asdict(TrainConfig(sync=sync))
    now = TrainConfig(sync=sync, eval=EvalConfig(every=7), checkpoint=CheckpointConfig(keep_last=9))
    line = "resuming with changed settings: eval.every 100 -> 7"
    assert changed_settings(saved, now) == [line] * told
