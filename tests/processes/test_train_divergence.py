"""Runs whose numbers become nan or inf: they end at that step, and what can be used is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gradsync.commands.train import loop
from gradsync.commands.train.config import CheckpointConfig, EvalConfig, OptimConfig, TrainConfig
from support.small_run import RankResult, small_config, train_rank


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def overflowing_rank(
    rank: int, world_size: int, store_path: str, config: TrainConfig
) -> RankResult:
    """Step 4 has a learning rate of 1e39."""
    rate = loop.learning_rate
    with mock.patch.object(loop, "learning_rate", lambda *a: 1e39 if a[1] == 3 else rate(*a)):
        return train_rank(rank, world_size, store_path, config)


# The update of step 4 overflows, so loss and norm of that step are finite, and weights are not.
@pytest.mark.parametrize(
    ("sync", "split"),
    [("invariant", ""), ("zero1", ""), ("fsdp", ""), ("diloco", ""), ("invariant", "pp=2")],
)
def test_weights_that_are_not_finite_are_not_saved(
    pool: Any, data: Path, tmp_path: Path, sync: str, split: str
) -> None:
    config = small_config(
        tmp_path,
        data,
        sync=sync,
        parallel=split,
        steps=4,
        eval=EvalConfig(every=0, max_tokens=32),
        checkpoint=CheckpointConfig(every=2, keep_last=1),
    )
    for result in pool.run(overflowing_rank, 2, config):
        assert result.error.startswith("DivergenceError: after step 4 there is nan or inf in "), (
            result
        )
        assert "embed.weight" in result.error
        assert "lower --optim.lr" in result.error
    assert saved(tmp_path) == ["step-00000002"]


def test_a_run_ends_at_the_step_not_at_the_next_log(pool: Any, data: Path, tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        data,
        steps=40,
        log_every=30,
        optim=OptimConfig(lr=1e18, warmup_steps=0),
        checkpoint=CheckpointConfig(every=1, keep_last=2),
    )
    for result in pool.run(train_rank, 2, config):
        assert "became nan at step 2; lower --optim.lr" in result.error
    assert saved(tmp_path) == ["step-00000001"]
