"""A training run small enough for a test, on the ranks of the process pool."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.train.config import CheckpointConfig, EvalConfig, OptimConfig, TrainConfig
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.run import train
from support.rank_session import open_session

VOCAB = 64


def make_data(directory: Path, *, num_tokens: int = 6_000, seed: int = 0) -> Path:
    """A nanoGPT-layout data set with something to learn: tokens that mostly count upwards."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, size in (("train", num_tokens), ("val", 1_000)):
        steps = rng.choice([1, 1, 1, 5], size=size)
        (np.cumsum(steps) % VOCAB).astype("<u2").tofile(directory / f"{split}.bin")
    return directory


def small_config(out: Path, data: Path, **changes: Any) -> TrainConfig:
    """Two layers of width 32, 8 leaves of 2 x 16 tokens, fp32, every step logged."""
    config = TrainConfig(
        preset="tiny",
        steps=6,
        out=str(out),
        data=str(data),
        tokens_per_update=256,
        micro_batch_size=2,
        dtype="fp32",
        device="cpu",
        threads=1,
        log_every=1,
        sample_tokens=0,
        model=GPTConfig(
            n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, block_size=16, dropout=0.1
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        eval=EvalConfig(every=3, max_tokens=None),
        checkpoint=CheckpointConfig(every=2, keep_last=2),
    )
    return replace(config, **changes)


@dataclass
class RankResult:
    """Results of one rank's `train`."""

    exit_code: int
    summary: dict[str, Any]
    printed: str
    error: str = ""


def train_rank(
    rank: int, world_size: int, store_path: str, config: TrainConfig, fault: FaultPlan | None = None
) -> RankResult:
    """Run `train` on this rank of the pool; gradsync's own errors come back as text."""
    printed = io.StringIO()
    session = open_session(rank, world_size, store_path)
    try:
        with session as world:
            own = {"threads": session.threads, "watch": lambda: session.watch}
            outcome = train(config, world, **own, stream=printed, fault=fault)
    except Exception as error:
        return RankResult(1, {}, printed.getvalue(), f"{type(error).__name__}: {error}")
    return RankResult(outcome.exit_code, outcome.summary, printed.getvalue())


@dataclass(frozen=True)
class OneRank:
    """The run that others are compared with."""

    out: Path
    printed: str

    def check_equal(self, out: Path, launcher: str, world_size: int = 2) -> None:
        """Bit for bit, on any number of ranks: the default is `invariant`."""
        expected, got = summary_of(self.out), summary_of(out)
        assert (got["launcher"], got["world_size"]) == (launcher, world_size)
        assert got["final_train_loss"] == expected["final_train_loss"]
        assert got["weights_sha256"] == expected["weights_sha256"]
        assert losses(out) == losses(self.out)
        assert json.loads((out / "exit.json").read_text())["exit_code"] == 0


@dataclass(frozen=True)
class Outcome:
    """Results of a run, equal where no bit differs."""

    losses: Mapping[int, float]
    val_loss: float
    weights_sha256: str


def finished(out: Path, results: list[RankResult]) -> Outcome:
    """Of a run that every rank has brought to its end."""
    assert {result.exit_code for result in results} == {0}, [r.error for r in results]
    summary = results[0].summary
    return Outcome(losses(out), summary["val_loss"], summary["weights_sha256"])


def summary_of(out: Path) -> dict[str, Any]:
    """The summary that a run writes at its end."""
    return json.loads((out / "summary.json").read_text())


def losses(out: Path) -> Mapping[int, float]:
    """Training loss of each step, as `metrics.jsonl` has it."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
