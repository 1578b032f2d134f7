"""`gradsync train --track`: every record reaches every tracker, and none can hurt the run."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gradsync.commands.cli import train as command
from gradsync.commands.cli.main import main
from gradsync.commands.train.faults import FaultPlan
from gradsync.commands.train.trackers import require_packages, tracker_names
from gradsync.errors import ConfigError
from support.small_run import make_data, summary_of

FLAGS = (
    *("--device", "cpu", "--dtype", "fp32", "--model.block-size", "16", "--model.n-layer", "1"),
    *("--model.n-embd", "16", "--model.n-head", "2", "--micro-batch-size", "2"),
    *("--tokens-per-update", "64", "--log-every", "2", "--eval.every", "3"),
    *("--checkpoint.every", "2", "--sample-tokens", "0", "--optim.warmup-steps", "2"),
    *("--optim.schedule", "constant"),
)
ALL = "tensorboard,wandb"
Record = tuple[int, str, float]


class Fake:
    """Stands for both packages: keeps what it was told. That of W&B raises in the call `fails`."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.got: dict[str, list[Record]] = {"tensorboard": [], "wandb": []}
        self.ended: list[tuple[str, int]] = []
        self.fails = ""

    def begin(self, tracker: str, /, **given: Any) -> None:
        self._may_fail(tracker, "begin")
        variables = {key: os.environ[key] for key in os.environ if key.startswith(tracker.upper())}
        self.begun.append({**variables, **given})

    def take(self, name: str, values: Mapping[str, float], step: int) -> None:
        self._may_fail(name, "take")
        self.got[name] += [(step, key, value) for key, value in values.items()]

    def end(self, name: str, exit_code: int = 0) -> None:
        self._may_fail(name, "end")
        self.ended.append((name, exit_code))

    def _may_fail(self, name: str, call: str) -> None:
        if name == "wandb" and self.fails == call:
            raise OSError(28, f"no room\nto {call}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    kept = Fake()

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            kept.begin("tensorboard", folder=folder, purge_step=purge_step)

        def add_text(self, name: str, text: str, step: int) -> None:
            kept.begun[-1][name] = json.loads(text)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            kept.take("tensorboard", {name: value}, step)

        def flush(self) -> None:
            pass

        def close(self) -> None:
            kept.end("tensorboard")

    def wandb_init(**given: Any) -> Any:
        kept.begin("wandb", **given)
        return SimpleNamespace(
            id=os.environ.get("WANDB_RUN_ID", f"id{len(kept.begun)}"),
            log=lambda values, step: kept.take("wandb", values, step),
            finish=lambda exit_code: kept.end("wandb", exit_code),
        )

    for name, parts in {
        "tensorboard": {},
        "torch.utils.tensorboard": {"SummaryWriter": SummaryWriter},
        "wandb": {"init": wandb_init},
    }.items():
        module = ModuleType(name)
        vars(module).update(parts, __spec__=ModuleSpec(name, None, origin="a test"))
        monkeypatch.setitem(sys.modules, name, module)
    for variable in [*os.environ]:
        if variable.startswith("WANDB"):
            monkeypatch.delenv(variable)
    return kept


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), num_tokens=2_000)


def train(data: Path, out: Path, *more: str) -> int:
    return main(["train", "tiny", *FLAGS, "--data", str(data), "--out", str(out), *more])


def written(out: Path) -> list[Record]:
    """Content of `metrics.jsonl`, as (step, name, value)."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        (record["step"], name, value)
        for record in records
        for name, value in record.items()
        if name != "step" and value is not None
    ]


def test_every_record_reaches_every_tracker_also_after_a_resume(
    fake: Fake, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plain = tmp_path / "first", tmp_path / "plain"
    assert train(data, out, "--steps", "4", "--track", ALL, "--json") == 0
    json.loads(capsys.readouterr().out)  # a tracker's words are not among it
    assert train(data, out, "--steps", "7", "--track", ALL) == 0
    records = written(out)
    assert [step for step, name, _ in records if name == "val/loss"] == [3, 4, 6, 7]
    assert fake.got == dict.fromkeys(fake.got, records)
    assert sorted(fake.ended) == sorted([(name, 0) for name in fake.got] * 2)

    assert train(data, plain, "--steps", "7") == 0
    assert summary_of(plain)["weights_sha256"] == summary_of(out)["weights_sha256"]
    assert len(fake.begun) == 4


def test_what_a_tracker_is_told_at_the_start(
    fake: Fake, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "first"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    before = dict(os.environ)
    assert train(data, out, "--steps", "2", "--track", ALL) == 0
    assert train(data, out, "--steps", "4", "--track", ALL) == 0
    assert dict(os.environ) == before
    configs = [each.pop("config") for each in fake.begun]
    assert [each["steps"] for each in configs] == [2] * 2 + [4] * 2
    assert configs[0]["optim"]["warmup_steps"] == 2
    board = {"folder": str(out / "tensorboard")}
    wandb = {"dir": str(out), "WANDB_PROJECT": "mine", "WANDB_NAME": "first"}
    wandb["WANDB_FINISH_TIMEOUT"] = "30"
    assert fake.begun == [
        board | {"purge_step": 1},
        wandb,
        board | {"purge_step": 3},
        wandb | {"WANDB_RUN_ID": "id2", "WANDB_RESUME": "allow"},
    ]


@pytest.mark.parametrize("call", ["begin", "take", "end"])
def test_a_tracker_that_raises_is_warned_of_once_and_left_alone(
    fake: Fake, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    fake.fails = call
    assert train(data, tmp_path, "--steps", "4", "--track", ALL) == 0
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said.startswith("tracker wandb failed and is left alone, the run goes on: OSError: ")
    assert "no room" in said
    assert "\n" not in said
    assert bool(fake.got["wandb"]) == (call == "end")
    assert fake.ended == [("tensorboard", 0)]
    assert fake.got["tensorboard"] == written(tmp_path)


@pytest.mark.parametrize(("kind", "code", "failed"), [("raise", 1, 1), ("sigterm", 75, 0)])
def test_trackers_end_with_a_run_that_fails_or_is_stopped(
    fake: Fake, data: Path, tmp_path: Path, kind: str, code: int, failed: int
) -> None:
    fault = FaultPlan(kind=kind, rank=0, step=3)
    arguments = ["tiny", *FLAGS, "--data", str(data), "--out", str(tmp_path), "--track", ALL]
    try:
        ended = command.run(arguments, fault)
    except ValueError:
        ended = 1
    assert ended == code
    assert sorted(fake.ended) == [("tensorboard", 0), ("wandb", failed)]
    assert fake.got["wandb"] == written(tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_starts(
    name: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    ranks = ("--nproc-per-node", "2")
    assert train(data, tmp_path / "out", "--track", name, *ranks) == 2
    assert capsys.readouterr().err == (
        f"gradsync: error: track={name} needs the package {name}: pip install 'gradsync[{name}]'\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # W&B makes one where a script runs
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="needs the package wandb"):
        require_packages("wandb")


def test_names_of_trackers() -> None:
    assert tracker_names("") == []
    assert tracker_names("wandb, tensorboard,wandb,") == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match=r"unknown tracker 'mlflow' .there are: tensorboard, w"):
        tracker_names("wandb,mlflow")
