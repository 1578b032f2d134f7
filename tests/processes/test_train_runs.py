"""Whole training runs on warm processes: equal at every world size, exact across a stop."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gradsync.commands.report.run import read_run
from gradsync.commands.train.config import EvalConfig, SyncConfig, TrainConfig
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.loop import Trainer
from gradsync.data.micro_batch import Batch
from gradsync.runtime.environ import exported
from gradsync.sync.registry import STRATEGIES
from support.small_run import Outcome, RankResult, finished, make_data, small_config, train_rank

BITWISE = [name for name, strategy in STRATEGIES.items() if strategy.promise == "bitwise"]
ROUNDING = [name for name, strategy in STRATEGIES.items() if strategy.promise == "rounding"]
LOSSY = [name for name, strategy in STRATEGIES.items() if strategy.promise == "lossy"]


Undisturbed = Callable[[str, int], Outcome]


@pytest.fixture(scope="module")
def undisturbed(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A strategy's run at a world size, once for all tests. On one rank, `naive` is the oracle of
    sums in any order and `invariant` that of the fixed tree."""

    @cache
    def run(sync: str, world_size: int) -> Outcome:
        return finish(
            pool, small_config(tmp_path_factory.mktemp(sync), data, sync=sync), world_size
        )

    return run


def finish(pool: Any, config: TrainConfig, world_size: int) -> Outcome:
    """A run to its end."""
    return finished(Path(config.out), pool.run(train_rank, world_size, config))


@pytest.mark.parametrize("sync", ROUNDING)
def test_losses_equal_those_of_one_rank(undisturbed: Undisturbed, sync: str) -> None:
    # Three ranks share eight leaves unevenly, and sums of three depend on their grouping.
    ranks = 3 if sync == "naive" else 2
    expected = undisturbed("naive", 1).losses
    assert undisturbed(sync, ranks).losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sync", BITWISE)
def test_bits_equal_those_of_one_rank(undisturbed: Undisturbed, sync: str) -> None:
    """On two and four ranks too, as runs that change their number show."""
    assert undisturbed(sync, 3) == undisturbed("invariant", 1)


@pytest.mark.parametrize("sync", LOSSY)
def test_what_rounds_on_purpose_learns_all_the_same(undisturbed: Undisturbed, sync: str) -> None:
    expected = undisturbed("naive", 1).losses
    assert undisturbed(sync, 2).losses == pytest.approx(expected, rel=0.05)


def stop_and_resume(pool: Any, config: TrainConfig, *ranks: int) -> tuple[Outcome, str]:
    """Stopped by a signal to the last rank after every third, then second step, and resumed on the
    next number of ranks."""
    for stop, world_size in enumerate(ranks[:-1]):
        fault = FaultPlan(kind="sigterm", rank=world_size - 1, step=3 + 2 * stop)
        stopped = pool.run(train_rank, world_size, config, fault)
        assert [result.exit_code for result in stopped] == [75] * world_size, stopped[0].error
        assert stopped[0].summary["steps"] == 3 + 2 * stop
        assert "SIGTERM" in stopped[0].summary["stopped_by"] or world_size > 1
    resumed = pool.run(train_rank, ranks[-1], config)
    outcome = finished(Path(config.out), resumed)
    assert "continuing from" in resumed[0].printed
    assert resumed[0].summary["first_step"] == stopped[0].summary["steps"] + 1
    return outcome, resumed[0].printed


@pytest.mark.parametrize("sync", ROUNDING)
def test_stop_and_resume_keeps_every_bit(
    pool: Any, data: Path, tmp_path: Path, undisturbed: Undisturbed, sync: str
) -> None:
    resumed, _ = stop_and_resume(pool, small_config(tmp_path, data, sync=sync), 2, 2)
    assert resumed == undisturbed(sync, 2)


@pytest.mark.parametrize("sync", BITWISE)
def test_resume_at_other_world_sizes_keeps_every_bit(
    pool: Any, data: Path, tmp_path: Path, undisturbed: Undisturbed, sync: str
) -> None:
    config = small_config(tmp_path, data, sync=sync)
    assert stop_and_resume(pool, config, 4, 1, 2)[0] == undisturbed("invariant", 1)


def test_resume_at_another_world_size_goes_on_with_the_same_samples(
    pool: Any, data: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    config = small_config(tmp_path, data, sync="naive")
    resumed, printed = stop_and_resume(pool, config, 2, 1)
    assert "world_size" in printed
    assert resumed.losses == pytest.approx(undisturbed("naive", 1).losses, rel=1e-6)


def test_one_ranks_exception_ends_all_with_that_traceback(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path, data, sync="naive")
    results = pool.run(train_rank, 3, config, FaultPlan(kind="raise", rank=1, step=4))
    assert results[1].error == "ValueError: a fault of gradsync drill"
    for other in (0, 2):
        assert "rank 1 on" in results[other].error
        assert "_fail" in results[other].error  # the traceback of rank 1
    # The checkpoint from before is there, and the run goes on from it.
    resumed = pool.run(train_rank, 3, config)
    assert resumed[0].exit_code == 0
    assert "step-00000002" in resumed[0].printed


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path, data, steps=4)
    assert pool.run(train_rank, 1, config)[0].exit_code == 0
    # MFU is a share of what its one thread could do, not of the whole host.
    assert "estimate: cores 1 x" in read_run(tmp_path).environment["peak_source"]
    victim = tmp_path / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    (again,) = pool.run(train_rank, 1, replace(config, steps=6))
    assert again.exit_code == 0
    assert "step-00000004 is of no use" in again.printed
    assert "using step-00000002" in again.printed


def test_resuming_something_else_is_refused_by_name(pool: Any, data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", data, steps=2)
    assert pool.run(train_rank, 1, config)[0].exit_code == 0
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"seed": 2}, "was trained with --seed 1337 --data "),
        ({"tokens_per_update": 128}, "num_leaves: 8 then, 4 now"),
        ({"dtype": "bf16"}, "dtype: 'fp32' then, 'bf16, one cast' now"),
        ({"model": replace(config.model, n_embd=48)}, "model.n_embd is 32 there, 48 here"),
        ({"data": str(make_data(tmp_path / "other", seed=1))}, f"--seed 1337 --data {data}: give"),
        ({"resume": "none"}, "already holds a run"),
    ]
    for changes, message in refusals:
        (refused,) = pool.run(train_rank, 1, replace(config, steps=4, **changes))
        assert message in refused.error
        assert refused.error.startswith(("ConfigError: ", "DataError: "))  # exit code 2
        assert "Traceback" not in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
        assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def unlike(rank: int, world_size: int, store_path: str, *configs: TrainConfig) -> RankResult:
    """Each rank with a configuration of its own."""
    return train_rank(rank, world_size, store_path, configs[rank])


def test_ranks_with_other_settings_or_data_are_refused_by_name(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    """They would train on leaves of another run, and nothing else would tell."""
    config = small_config(tmp_path / "run", data)
    optim = replace(config.optim, min_lr_ratio=0.5)
    other = str(make_data(tmp_path / "other", seed=1))
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"seed": 2}, "seed differs: rank 0 1337, rank 1 2; "),
        ({"optim": optim}, "optim.min_lr_ratio differs: rank 0 0.1, rank 1 0.5; "),
        ({"data": other}, "training data differs: rank 0 TokenDataset:374:"),
    ]
    for changes, message in refusals:
        for result in pool.run(unlike, 2, config, replace(config, **changes)):
            assert result.error.startswith(f"ConfigError: {message}")
    assert not (tmp_path / "run").exists()
    copy = shutil.copytree(data, tmp_path / "copy")
    machine = replace(config, data=str(copy), keep_memory=False, silence_s=9.0)
    assert [r.error for r in pool.run(unlike, 2, config, machine)] == ["", ""]


def unlike_machines(rank: int, world_size: int, store_path: str, *given: Any) -> RankResult:
    with exported({"MKL_CBWR": ("AVX2", "COMPATIBLE")[rank]}):
        return train_rank(rank, world_size, store_path, *given)


def test_ranks_that_compute_with_other_bits_are_told(pool: Any, data: Path, tmp_path: Path) -> None:
    """Their replicas may drift, and the bits are not those of one rank; nothing else tells."""
    config = small_config(tmp_path / "run", data, steps=1)
    first, second = pool.run(unlike_machines, 2, config)
    assert (first.error, second.error) == ("", "")
    said = "note: math_env differs: rank 0 'MKL_CBWR=AVX2', rank 1 'MKL_CBWR=COMPATIBLE'"
    assert said in first.printed
    assert "differs: " not in pool.run(train_rank, 2, replace(config, steps=2))[0].printed


def test_numeric_change_can_be_allowed(pool: Any, data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data, steps=2)
    finish(pool, config, 1)
    optim = replace(config.optim, weight_decay=0.5)
    changed = replace(config, steps=4, dtype="bf16", allow_numeric_change=True, optim=optim)
    (result,) = pool.run(train_rank, 1, changed)
    assert result.exit_code == 0
    assert "note: dtype: 'fp32' then, 'bf16, one cast' now" in result.printed
    assert "note: resuming with changed settings: optim.weight_decay 0.1 -> 0.5" in result.printed
    state = json.loads((tmp_path / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["optimizer"]["groups"][0]["weight_decay"] == 0.5


@pytest.mark.parametrize("sync", ["invariant", "zero1", "naive", "ddp", "fsdp"])
def test_parts_of_a_step_are_its_time(pool: Any, data: Path, tmp_path: Path, sync: str) -> None:
    """Exposed communication is in none of the others, wherever the strategy waits."""
    finish(pool, small_config(tmp_path, data, steps=4, sync=sync, eval=EvalConfig(every=0)), 2)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    for line in (each for each in lines if "train/loss" in each):
        names = (f"perf/{part}_s" for part in ("forward", "backward", "update", "data"))
        parts = [line[name] for name in names]
        assert min(parts) > 0
        assert sum(parts) + line["comm/exposed_s"] <= line["perf/step_s"]


def test_the_run_directory_holds_what_it_promises_and_a_finished_run_is_left_as_it_is(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path, data)
    # A signal in the last step comes too late.
    first, _ = pool.run(train_rank, 2, config, FaultPlan(kind="sigterm", rank=1, step=6))
    table = json.loads((tmp_path / "ranks.json").read_text())
    assert [row["rank"] for row in table["ranks"]] == [0, 1]
    names = ("config.yaml", "env.json", "metrics.jsonl", "summary.json", "logs/rank_00001.log")
    assert [name for name in names if not (tmp_path / name).is_file()] == []
    start = json.loads((tmp_path / "starts.jsonl").read_text())
    assert (start["step"], start["world_size"], start["before"]) == (0, 2, None)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-00000004", "step-00000006"]
    assert (first.exit_code, first.summary["stopped_by"]) == (0, "")
    assert first.summary["tokens"] == 6 * 256
    assert first.summary["val_loss"] < 4.15  # better than guessing: ln 64 = 4.16
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    again, _ = pool.run(train_rank, 2, config)
    assert (again.exit_code, again.summary) == (0, first.summary)
    assert "nothing to do" in again.printed
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before


@pytest.mark.parametrize(
    ("sync", "ranks", "changes"),
    [
        ("invariant", 3, {"activation_checkpointing": True}),
        ("ddp", 2, {"activation_checkpointing": True}),
        ("invariant", 2, {"sync_options": SyncConfig(weights="replicas")}),
        ("invariant", 2, {"sync_options": SyncConfig(update="whole")}),
    ],
)
def test_what_changes_no_bit(
    pool: Any,
    data: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    sync: str,
    ranks: int,
    changes: dict[str, Any],
) -> None:
    """Recomputed activations, and a copy of the weights on each rank."""
    config = small_config(tmp_path, data, sync=sync, **changes)
    expected = undisturbed(sync, 1 if sync == "invariant" else ranks)
    assert finish(pool, config, ranks).weights_sha256 == expected.weights_sha256


def flip_one_bit(
    rank: int, world_size: int, store_path: str, config: TrainConfig, where: str
) -> RankResult:
    """As `train_rank`, with one bit flipped on rank 1 right after step 3: of a weight, `seen`
    or `unseen` by autograd's counters, or of the optimizer's `state`."""
    original = Trainer._train_step

    def step_and_flip(self: Trainer, batch: Batch, *rest: Any) -> Any:
        result = original(self, batch, *rest)
        if (rank, batch.number) == (1, 3):
            weight = self.learner.model.get_parameter("blocks.1.mlp.up.weight")
            state = self.learner.optimizer.state[weight].get("exp_avg_sq", weight)
            tensor = {"seen": weight.detach(), "unseen": weight.data, "state": state}[where]
            tensor.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 20)
        return result

    with mock.patch.object(Trainer, "_train_step", step_and_flip):
        return train_rank(rank, world_size, store_path, config)


@pytest.mark.parametrize(
    ("where", "every", "verdict"),
    [
        ("unseen", 1, "replicas differ after step 4.* rank 1 holds other bits than ranks 0,2"),
        ("state", 1, "replicas differ after step 4.* rank 1 holds other bits than ranks 0,2"),
        ("seen", 0, "replicas differ,.* weights were changed on rank 1, not"),
    ],
    ids=["check_replicas", "check_replicas, optimizer", "the step itself"],
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    pool: Any, data: Path, tmp_path: Path, where: str, every: int, verdict: str
) -> None:
    """Before the next step, in which its owner's bits would heal it, or it the others'."""
    given = SyncConfig(weights="replicas", update="whole" if where == "state" else None)
    config = small_config(tmp_path, data, check_replicas_every=every, sync_options=given)
    for result in pool.run(flip_one_bit, 3, config, where):
        assert result.exit_code == 1
        assert "blocks.1.mlp.up.weight" in result.error
        assert re.search(verdict, result.error), result.error


def test_no_checkpoint_is_written_of_replicas_that_differ(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    given = SyncConfig(weights="replicas")
    config = small_config(tmp_path, data, check_replicas_every=100, sync_options=given)
    results = pool.run(flip_one_bit, 2, config, "unseen")
    assert "without a majority" in results[0].error
    saved = [each.name for each in (tmp_path / "checkpoints").glob("step*")]
    assert saved == ["step-00000002"]


def test_a_bit_flipped_in_the_one_copy_of_the_weights_is_refused(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    """All ranks of the host train the same memory; the others meet a rank that has ended."""
    results = pool.run(flip_one_bit, 2, small_config(tmp_path, data), "seen")
    assert [result.exit_code for result in results] == [1, 1]
    assert "all ranks of the host share one copy of them" in results[1].error
    assert "rank 1" in results[0].error
