"""`gradsync train --track` on two ranks: rank 0 tracks, and no rank waits for a refusal."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.trackers import KINDS
from support.fork_server import run_forked
from support.requirements import require
from support.small_run import RankResult, losses, make_data, small_config, train_rank


class Made:
    """A tracker that keeps losses in a file, and counts those that this process made."""

    count = 0

    def __init__(self, folder: Path, *_: Any) -> None:
        type(self).count += 1
        self._kept, self._path = {}, folder / "tracked.json"

    def log(self, values: dict[str, float], step: int) -> None:
        if "train/loss" in values:
            self._kept[step] = values["train/loss"]

    def finish(self, *, failed: bool) -> None:
        self._path.write_text(json.dumps([failed, list(self._kept.items())]))


def counted_rank(
    rank: int, world_size: int, store_path: str, config: TrainConfig
) -> tuple[RankResult, int]:
    """This rank's run, and how many trackers it made."""
    Made.count = 0
    package = ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None, origin="a test")
    modules = mock.patch.dict(sys.modules, tensorboard=package)
    with modules, mock.patch.dict(KINDS, tensorboard=Made):
        return train_rank(rank, world_size, store_path, config), Made.count


def test_rank_0_alone_tracks_and_weights_stay(pool: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    hashes = []
    for track, made in (("", [0, 0]), ("tensorboard", [1, 0])):
        config = small_config(tmp_path / f"out{track}", data, track=track)
        ranks = pool.run(counted_rank, 2, config)
        assert [count for _, count in ranks] == made
        assert [result.exit_code for result, _ in ranks] == [0, 0], ranks
        hashes.append(ranks[0][0].summary["weights_sha256"])
    assert hashes[0] == hashes[1]
    tracked = tmp_path / "outtensorboard"
    assert losses(tmp_path / "out") == losses(tracked)
    failed, kept = json.loads((tracked / "tracked.json").read_text())
    assert (failed, dict(kept)) == (False, losses(tracked))


READ_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps([[event.step, event.value] for event in events.Scalars("train/loss")]))
"""


def test_the_packages_themselves_take_a_run_and_the_one_that_goes_on(tmp_path: Path) -> None:
    """TensorBoard, and W&B without a network: what they keep is what metrics.jsonl has."""
    require("trackers")
    out = tmp_path / "run"
    argv = ["-m", "gradsync", "train", "tiny", "--out", str(out), "--resume", "auto"]
    argv += ["--data", str(make_data(tmp_path / "data")), "--dtype", "fp32", "--device", "cpu"]
    argv += ["--tokens-per-update", "256", "--micro-batch-size", "1", "--log-every", "1"]
    argv += ["--eval.every", "0", "--sample-tokens", "0", "--track", "tensorboard,wandb"]
    for steps in ("2", "4"):
        offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        done = run_forked([*argv, "--steps", steps], [offline])[0].ok()
        assert "tracker" not in done.stderr, done.stderr
    kept = losses(out)
    assert list(kept) == [1, 2, 3, 4]
    (reader := tmp_path / "read.py").write_text(READ_EVENTS)
    told = run_forked([reader, out / "tensorboard"])[0].ok().stdout
    assert dict(json.loads(told)) == pytest.approx(kept)
    runs = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({path.name for path in runs}) == 1 < len(runs), "two parts of one run"
    assert all(b"train/loss" in path.read_bytes() for path in runs)
