"""Checkpoints of state that ranks share out: a file of each rank, and any number of ranks goes on.

`zero1` keeps one rank's bits, so a chain of runs that ends there must have them; `fsdp` and `ddp`
add up in another order: fp32 rounding, about 1e-7 of a loss here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gradsync.checkpoint.store import CheckpointStore
from gradsync.checkpoint.weights import load_weights
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import CheckpointConfig, EvalConfig, OptimConfig, TrainConfig
from gradsync.commands.train.loop import Trainer
from gradsync.core.files import Filesystem
from gradsync.sync.fsdp import FsdpShards
from gradsync.sync.ownership.sharded_optimizer import ShardedUpdate
from support.small_run import VOCAB, Outcome, RankResult, finished, small_config, train_rank

# A width that 64 does not divide, so that shares end inside of rows.
MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=36, vocab_size=VOCAB, block_size=16, dropout=0.1)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant", clip_norm=0.5)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def one_rank(
    pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcome]:
    """One rank's undisturbed run of six steps, once for all tests."""

    @cache
    def run(sync: str) -> Outcome:
        out = tmp_path_factory.mktemp("oracle")
        return finished(out, pool.run(train_rank, 1, config(out, data, sync, 6)))

    return run


def config(out: Path, data: Path, sync: str, steps: int, **changes: Any) -> TrainConfig:
    return small_config(
        out,
        data,
        model=MODEL,
        sync=sync,
        steps=steps,
        optim=OPTIM,
        eval=EvalConfig(every=0, max_tokens=None),
        checkpoint=CheckpointConfig(every=0, keep_last=3),
        tokens_per_update=192,  # 6 leaves, equally many for 1, 2 and 3 ranks
        allow_numeric_change=True,
        **changes,
    )


def parts_in(out: Path, step: int) -> dict[str, Any]:
    """The manifest's places, whose files are all there."""
    directory = out / "checkpoints" / f"step-{step:08d}"
    places = json.loads((directory / "manifest.json").read_text())["manifest"]["places"]
    assert {path.stem for path in directory.glob("part-*")} == set(places)
    return places


def train_in_shares(rank: int, world_size: int, store_path: str, run: TrainConfig) -> RankResult:
    """A run in which no rank may bring the optimizer's state together."""
    never = mock.Mock(side_effect=AssertionError("state was brought together"))
    with (
        mock.patch.object(ShardedUpdate, "give_back", never),
        mock.patch.object(FsdpShards, "gather", never),
    ):
        return train_rank(rank, world_size, store_path, run)


@pytest.mark.parametrize(
    ("chain", "bits"),
    [
        ([(2, "zero1", ""), (1, "invariant", ""), (3, "zero1", "")], True),
        ([(3, "fsdp", ""), (2, "zero2", ""), (1, "ddp", "")], False),
        ([(2, "invariant", "pp=2"), (2, "zero1", ""), (3, "fsdp", "")], False),
    ],
    ids=["zero1-bits", "fsdp-zero2-ddp", "pipeline-zero1-fsdp"],
)
def test_any_number_of_ranks_and_any_strategy_goes_on(
    pool: Any,
    data: Path,
    tmp_path: Path,
    one_rank: Callable[[str], Outcome],
    chain: list[tuple[int, str, str]],
    bits: bool,
) -> None:
    for steps, (ranks, sync, parallel) in zip((2, 4, 6), chain, strict=True):
        run = config(tmp_path, data, sync, steps, parallel=parallel)
        results = pool.run(train_in_shares, ranks, run)
        found = finished(tmp_path, results)
        if sync in ("zero1", "zero2", "fsdp"):
            assert len(parts_in(tmp_path, steps)) == ranks
    assert "continuing from" in results[0].printed
    expected = one_rank("invariant")
    if bits:
        assert found == expected
    else:
        assert found.losses == pytest.approx(expected.losses, rel=ROUNDING)


def rank_that_fails(
    rank: int, world_size: int, store_path: str, run: TrainConfig, victim: int
) -> RankResult:
    """A run in which one rank cannot go on in the middle of the second checkpoint."""
    saves = 0
    sends = ProcessGroupCommunicator.exchange
    write = Filesystem.write

    def exchange(self: ProcessGroupCommunicator, *batch: Any) -> Any:
        if rank == victim != 0 and saves == 2:
            raise OSError("injected")
        return sends(self, *batch)

    def disk(self: Filesystem, file: Any, data: Any) -> int:
        if rank == victim == 0 and saves == 2 and "part-00000" in str(file.name):
            raise OSError(28, "No space left on device")
        return write(self, file, data)

    original = Trainer._save

    def save(self: Trainer, step: int, **more: Any) -> None:
        nonlocal saves
        saves += 1
        original(self, step, **more)

    with (
        mock.patch.object(ProcessGroupCommunicator, "exchange", exchange),
        mock.patch.object(Filesystem, "write", disk),
        mock.patch.object(Trainer, "_save", save),
    ):
        return train_rank(rank, world_size, store_path, run)


@pytest.mark.parametrize(("sync", "victim"), [("zero1", 1), ("fsdp", 0)])
def test_a_rank_that_fails_while_saving_ends_all(
    pool: Any, data: Path, tmp_path: Path, sync: str, victim: int
) -> None:
    run = config(tmp_path, data, sync, 4)
    run = replace(run, checkpoint=CheckpointConfig(every=1, keep_last=3))
    results = pool.run(rank_that_fails, 2, run, victim)
    assert ("No space left" if victim == 0 else "injected") in results[victim].error
    assert f"rank {victim} on" in results[1 - victim].error
    # The one before is good, and nothing half-written counts.
    info, problems = CheckpointStore(tmp_path / "checkpoints").latest()
    assert info is not None
    assert (info.manifest.step, problems) == (1, [])


def test_a_checkpoint_in_shares_is_read_as_a_whole_one(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    finished(tmp_path, pool.run(train_rank, 3, config(tmp_path, data, "zero1", 1)))
    places = parts_in(tmp_path, 1)
    flat = [place["flat"] for part in places.values() for place in part.values() if "flat" in place]
    assert flat, "this width has shares that end inside of a row"
    assert all(begin % 64 == 0 for begin, _ in flat)
    # Numbers are saved once, weights in a file of their own.
    names = [name for part in places.values() for name in part]
    steps = [name for name in names if name.startswith("optimizer/step/")]
    assert len(steps) == len(set(steps)) > 0
    found = CheckpointStore(tmp_path / "checkpoints").load(
        tmp_path / "checkpoints" / "step-00000001"
    )
    assert set(found.tensors) == {"model", "optimizer"}
    load_weights(GPT(MODEL), found.tensors["model"])
