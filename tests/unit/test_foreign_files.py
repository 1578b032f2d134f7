"""Checkpoints and data sets that no run has written: one line, and exit code 1 or 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from support.foreign_files import make_run, replace_header, rewrite_json, rewrite_manifest, train

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("foreign"))


def refused(capsys: pytest.CaptureFixture[str], call: Callable[[], int], words: str) -> None:
    capsys.readouterr()
    assert call() in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1, said
    assert "Traceback" not in said


def header(text: bytes) -> Damage:
    """The tensors' file has another header."""

    def damage(checkpoint: Path) -> None:
        replace_header(checkpoint / "model.safetensors", text)
        rewrite_manifest(checkpoint)

    return damage


def state(change: Callable[[Any], Any]) -> Damage:
    """Another state was saved."""

    def damage(checkpoint: Path) -> None:
        rewrite_json(checkpoint / "state.json", change)
        rewrite_manifest(checkpoint)

    return damage


def model(**changes: Any) -> Damage:
    return state(lambda saved: saved["model"].update(changes))


def without_slots(saved: dict[str, Any]) -> None:
    for entry in saved["optimizer"]["params"].values():
        entry.update(slots=["exp_avg"])


@pytest.mark.parametrize(
    ("command", "damage", "words"),
    [
        (
            "sample",
            lambda checkpoint: (checkpoint / "manifest.json").write_text('{"manifest": {"step": N'),
            "manifest.json",
        ),
        ("sample", header(b"{}"), "not readable as safetensors"),
        ("sample", model(dropout="a"), "state.json has no model to build"),
        ("sample", model(n_head=0), "n_head: got 0"),
        ("train", state(lambda saved: saved.clear()), "state.json has no optimizer"),
        ("train", state(lambda saved: saved.update(data=[1])), "state.json has no data"),
        (
            "train",
            state(lambda saved: saved["optimizer"].update(groups=[5])),
            "expected its class, groups and",
        ),
        ("train", state(without_slots), "belongs to no parameter"),
        (
            "train",
            state(lambda saved: saved["optimizer"]["groups"][0].update(betas="abc")),
            "betas is 'abc', expected something like [0.9, 0.95]",
        ),
    ],
)
def test_a_checkpoint_that_no_run_has_saved(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    damage: Damage,
    words: str,
) -> None:
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-00000001")
    calls = {
        "sample": lambda: main(["sample", str(tmp_path / "run")]),
        "train": lambda: train(tmp_path / "run", run.parent / "data"),
    }
    refused(capsys, calls[command], words)


def test_data_that_are_none(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    shutil.copytree(run.parent / "data", data)
    rewrite_json(data / "meta.json", lambda meta: meta.update(unigram_entropy_nats=float("nan")))
    words = "NaN where a finite number belongs"
    refused(capsys, lambda: train(tmp_path / "new", data), words)


def test_a_run_is_done_though_its_tokenizer_is_not_known(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(run.parent / "data", data)
    rewrite_json(data / "meta.json", lambda meta: meta.update(tokenizer="other"))
    flags = ("--sample-tokens", "4")
    assert train(tmp_path / "new", data, *flags, steps=1) == 0
    assert "no sample: " in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "exit.json").read_text())["exit_code"] == 0
