"""Training by rounds (`local_sgd`, `diloco`): the one model is what is evaluated and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.train.config import (
    CheckpointConfig,
    EvalConfig,
    OptimConfig,
    SyncConfig,
    TrainConfig,
)
from support.small_run import make_data, small_config, train_rank


def round_config(out: Path, data: Path, sync: str, steps: int) -> TrainConfig:
    """Rounds longer than the run, evaluation after the second step, a constant learning rate."""
    return small_config(
        out,
        data,
        sync=sync,
        steps=steps,
        sync_options=SyncConfig(inner_steps=100),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant"),
        eval=EvalConfig(every=2, max_tokens=None),
        checkpoint=CheckpointConfig(every=0),
    )


def validation_losses(out: Path) -> dict[int, float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_a_validation_in_mid_round_is_that_of_the_model_a_checkpoint_would_hold(
    pool: Any, tmp_path: Path, sync: str
) -> None:
    data = make_data(tmp_path / "data")
    for steps in (2, 3):
        config = round_config(tmp_path / str(steps), data, sync, steps)
        results = pool.run(train_rank, 2, config)
        assert [result.exit_code for result in results] == [0, 0], results[0].error
    # The first run ended, and saved, where the second one only looked.
    ended, passed = (validation_losses(tmp_path / steps) for steps in "23")
    assert passed[2] == ended[2]


def test_another_strategy_resumes_without_the_outer_momentum(pool: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    config = round_config(tmp_path / "run", data, "diloco", 2)
    assert [result.exit_code for result in pool.run(train_rank, 2, config)] == [0, 0]
    options = SyncConfig()
    other = replace(
        config, sync="invariant", sync_options=options, steps=4, allow_numeric_change=True
    )
    results = pool.run(train_rank, 2, other)
    assert [result.exit_code for result in results] == [0, 0], results[0].error
    said = "note: diloco's outer momentum is left behind: the run goes on with invariant"
    assert said in results[0].printed
    # Back again, from a checkpoint that has none.
    back = replace(config, steps=6, allow_numeric_change=True)
    results = pool.run(train_rank, 2, back)
    assert [result.exit_code for result in results] == [0, 0], results[0].error
    assert "left behind" not in results[0].printed
