"""Whole training runs of a model that is split over ranks: the losses of one rank.

With a head of its own a pipeline gives one rank's bits: each leaf goes through the same operations,
and sums over leaves follow the same tree. A tied head's gradient is added up in another order (see
Note: Tied ends), and tensor shards add up two halves of each sum: fp32 rounding, about 1e-7 of a
loss here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.split_sync import SplitSync
from gradsync.commands.train.config import CheckpointConfig, EvalConfig, OptimConfig, TrainConfig
from gradsync.commands.train.faults import FaultPlan
from support.small_run import VOCAB, Outcome, RankResult, finished, small_config, train_rank

TIED = GPTConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=32, vocab_size=VOCAB, block_size=16, dropout=0.1
)
UNTIED = replace(TIED, tie_head=False)
RUN = {
    "steps": 4,
    "optim": OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant", clip_norm=0.5),
    "eval": EvalConfig(every=0, max_tokens=None),
    "checkpoint": CheckpointConfig(every=2, keep_last=2),
}
ROUNDING = 1e-6


OneRank = Callable[[GPTConfig], Outcome]


@pytest.fixture(scope="module")
def one_rank(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """One rank's undisturbed run, once for all tests."""

    @cache
    def run(model: GPTConfig) -> Outcome:
        out = tmp_path_factory.mktemp("oracle")
        return finished(out, pool.run(train_rank, 1, config(out, data, model)))

    return run


def config(out: Path, data: Path, model: GPTConfig, **changes: Any) -> TrainConfig:
    return small_config(out, data, model=model, **{**RUN, **changes})


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"parallel": "pp=2", "activation_checkpointing": True}),
        (4, {"parallel": "pp=2,dp=2", "check_replicas_every": 2}),
    ],
    ids=["pp", "pp-dp"],
)
def test_a_pipeline_has_one_ranks_bits(
    pool: Any, data: Path, tmp_path: Path, one_rank: OneRank, ranks: int, changes: dict[str, Any]
) -> None:
    results = pool.run(train_rank, ranks, config(tmp_path, data, UNTIED, **changes))
    assert finished(tmp_path, results) == one_rank(UNTIED)
    # A replica's parts are files of one checkpoint.
    files = {path.stem for path in (tmp_path / "checkpoints").glob("step-00000004/part-*")}
    assert files == {"part-00000-of-00002", "part-00001-of-00002"}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"parallel": "pp=2,dp=2", "check_replicas_every": 1}),
        (2, {"parallel": "tp=2"}),
        (4, {"parallel": "tp=2,dp=2", "sync": "bucketed", "check_replicas_every": 1}),
        (4, {"parallel": "pp=2,tp=2"}),
    ],
    ids=lambda value: value["parallel"] if isinstance(value, dict) else None,
)
def test_a_split_model_has_one_ranks_losses(
    pool: Any, data: Path, tmp_path: Path, one_rank: OneRank, ranks: int, changes: dict[str, Any]
) -> None:
    found = finished(tmp_path, pool.run(train_rank, ranks, config(tmp_path, data, TIED, **changes)))
    expected = one_rank(TIED)
    assert found.losses == pytest.approx(expected.losses, rel=ROUNDING)
    assert found.val_loss == pytest.approx(expected.val_loss, rel=ROUNDING)
    if changes == {"parallel": "tp=2"}:  # the manifest says where each piece lies
        text = (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").read_text()
        places = json.loads(text)["manifest"]["places"]["part-00001-of-00002"]
        piece = places["model/blocks.0.attention.out.weight"]
        assert piece == {"whole": [32, 32], "start": [0, 16]}
        assert "model/embed.weight" not in places  # the first shard's


@pytest.mark.parametrize(
    ("first", "then"),
    [((4, "pp=2,dp=2"), (1, "")), ((1, ""), (4, "pp=2,dp=2")), ((4, "pp=2,tp=2"), (2, "pp=2"))],
    ids=["pipeline-to-one", "one-to-pipeline", "shards-to-pipeline"],
)
def test_a_run_goes_on_with_another_layout(
    pool: Any,
    data: Path,
    tmp_path: Path,
    one_rank: OneRank,
    first: tuple[int, str],
    then: tuple[int, str],
) -> None:
    """Stopped by a signal to the last rank."""
    expected = one_rank(UNTIED)
    began = config(tmp_path, data, UNTIED, parallel=first[1])
    stop = FaultPlan(kind="sigterm", rank=first[0] - 1, step=2)
    stopped = pool.run(train_rank, first[0], began, stop)
    assert [result.exit_code for result in stopped] == [75] * first[0], stopped[0].error
    assert stopped[0].summary["steps"] == 2

    goes_on = config(tmp_path, data, UNTIED, parallel=then[1])
    results = pool.run(train_rank, then[0], goes_on)
    assert "continuing from" in results[0].printed
    assert "parallel: " in results[0].printed  # the layout is another one, and the user is told
    found = finished(tmp_path, results)
    if "tp" in first[1]:
        assert found.losses == pytest.approx(expected.losses, rel=ROUNDING)
    else:
        assert found == expected


def test_mixed_precision_has_one_ranks_bits(pool: Any, data: Path, tmp_path: Path) -> None:
    """bf16 branches on an fp32 stream: what travels between stages is the stream."""
    found = []
    for ranks, parallel in ((1, ""), (2, "pp=2")):
        out = tmp_path / f"{ranks}"
        run = config(out, data, UNTIED, parallel=parallel, dtype="bf16", steps=2)
        found.append(finished(out, pool.run(train_rank, ranks, run)))
    assert found[0] == found[1]


def rank_with_a_flipped_bit(
    rank: int, world_size: int, store_path: str, run: TrainConfig
) -> RankResult:
    """Changes one weight of rank 3 before replicas are compared."""
    original = SplitSync.check_replicas

    def flip_and_check(self: SplitSync, *args: Any, **named: Any) -> bool:
        if rank == 3:
            with torch.no_grad():
                self.model.get_parameter("norm.weight")[0] += 1.0
        return original(self, *args, **named)

    with mock.patch.object(SplitSync, "check_replicas", flip_and_check):
        return train_rank(rank, world_size, store_path, run)


def test_replicas_that_differ_are_named(pool: Any, data: Path, tmp_path: Path) -> None:
    run = config(tmp_path, data, TIED, parallel="pp=2,dp=2", check_replicas_every=1)
    errors = [result.error for result in pool.run(rank_with_a_flipped_bit, 4, run)]
    assert all(errors)
    assert re.search("'norm.weight'.* rank 1 / rank 3 hold different bits", errors[3]), errors[3]
