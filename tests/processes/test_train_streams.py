"""Whole training runs on streamed text: one result on any number of ranks, and across a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gradsync.commands.train.config import EvalConfig, OptimConfig, TrainConfig
from gradsync.commands.train.faults import FaultPlan
from gradsync.data.streaming import StreamLoader
from support.small_run import RankResult, losses, small_config, train_rank


def stream_config(out: Path, data: Path) -> TrainConfig:
    """Two passes over the text; the learning rate is twice that of half the batch."""
    config = small_config(out, data, eval=EvalConfig(every=3, max_tokens=128))
    optim = OptimConfig(lr=5e-3, lr_scaling="linear", lr_base_batch=128, warmup_steps=2)
    return replace(config, model=replace(config.model, vocab_size=257), optim=optim)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for part in range(2):
        texts = [f"{part} and {number} make {part + number}. " * 3 for number in range(10)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


def test_any_number_of_ranks_and_a_stop_give_the_same_weights(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    three = pool.run(train_rank, 3, stream_config(tmp_path / "3", data))
    (whole,) = pool.run(train_rank, 1, stream_config(tmp_path / "1", data))
    assert {result.error for result in (whole, *three)} == {""}
    assert three[0].summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert three[0].summary["val_loss"] == whole.summary["val_loss"]

    config = stream_config(tmp_path / "stopped", data)
    stopped = pool.run(train_rank, 2, config, FaultPlan(kind="sigterm", rank=1, step=4))
    assert {result.exit_code for result in stopped} == {75}, stopped[0].error
    (resumed,) = pool.run(train_rank, 1, config)
    assert resumed.error == ""
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "1")

    assert whole.summary["peak_lr"] == 0.01
    lines = map(json.loads, (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines())
    assert [line["optim/lr"] for line in lines if "optim/lr" in line][:2] == [0.005, 0.01]
    assert resumed.summary["config"]["optim"]["lr"] == 5e-3  # a resume does not scale it again


def _dries_up(rank: int, world_size: int, store_path: str, config: TrainConfig) -> RankResult:
    next_step = StreamLoader._next_step

    def until_the_third(self: StreamLoader) -> Any:
        return None if self.state_dict()["steps"] == 2 else next_step(self)

    with mock.patch.object(StreamLoader, "_next_step", until_the_third):
        return train_rank(rank, world_size, store_path, config)


def test_a_stream_that_dries_up_has_not_finished_the_run(
    pool: Any, data: Path, tmp_path: Path
) -> None:
    (result,) = pool.run(_dries_up, 1, stream_config(tmp_path / "run", data))
    assert result.error == "DataError: the data ended after step 2 of 6"
