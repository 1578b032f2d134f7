"""Made-up checkpoints and data sets: one line, exit code 1 or 2, at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from support.foreign_files import (
    make_run,
    replace_header,
    rewrite_header,
    rewrite_json,
    rewrite_manifest,
    train,
)

Damage = Callable[[Path], None]
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("foreign"))


def refused(capsys: pytest.CaptureFixture[str], call: Callable[[], int], words: str) -> None:
    """It ends within seconds, with one line."""
    capsys.readouterr()
    began = time.process_time()
    assert call() in (1, 2)
    assert time.process_time() - began < 5
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1, said
    assert is_plain(said)
    assert "Traceback" not in said
    assert len(said) < 800


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 36)  # a hole: takes no room


def text(content: str) -> Damage:
    return lambda path: path.write_text(content) and None


# -- checkpoints ----------------------------------------------------------------------------------


def file(damage: Damage) -> Damage:
    """The manifest itself is damaged."""
    return lambda checkpoint: damage(checkpoint / "manifest.json")


def sealed(change: Change) -> Damage:
    """The manifest's hash fits what it says."""
    return lambda checkpoint: rewrite_manifest(checkpoint, change)


def header(change: bytes | Change) -> Damage:
    """The tensors' file has another header."""

    def damage(checkpoint: Path) -> None:
        rewrite = replace_header if isinstance(change, bytes) else rewrite_header
        rewrite(checkpoint / "model.safetensors", change)
        rewrite_manifest(checkpoint)

    return damage


def state(change: Change) -> Damage:
    """Another state was saved."""

    def damage(checkpoint: Path) -> None:
        rewrite_json(checkpoint / "state.json", change)
        rewrite_manifest(checkpoint)

    return damage


def model(**changes: Any) -> Damage:
    return state(lambda state: state["model"].update(changes))


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(iter(header.values()))


def each_parameter(**changes: Any) -> Damage:
    def change(saved: dict[str, Any]) -> None:
        for entry in saved["optimizer"]["params"].values():
            entry.update(changes)

    return state(change)


def of_group(**changes: Any) -> Damage:
    return state(lambda saved: saved["optimizer"]["groups"][0].update(changes))


SAMPLED: list[tuple[Damage, str]] = [
    (file(pipe), "is not a regular file"),
    (file(huge), "has more than"),
    (file(text('{"manifest": {"step": NaN}}')), "NaN where a finite number belongs"),
    (sealed(lambda body: body.update(files=[1])), "not the entries of a manifest"),
    (sealed(lambda body: body["aliases"].update(model={"a": "b"})), "no tensor 'b'"),
    (header(lambda h: first(h).update(shape="ab")), "not readable as safetensors"),
    (header(lambda h: first(h).update(data_offsets=[8, 1032])), "not readable as safetensors"),
    (header(lambda h: h.clear()), "not readable as safetensors"),
    (header(b"[1, 2]"), "not readable as safetensors"),
    (model(dropout="a"), "state.json has no model to build"),
    (model(n_head=0), "n_head: got 0"),
]
TRAINED_ON: list[tuple[Damage, str]] = [
    (state(lambda saved: saved.clear()), "state.json has no optimizer"),
    (state(lambda saved: saved.update(data=[1])), "state.json has no data"),
    (state(lambda saved: saved.update(optimizer={"class": 1})), "expected its class, groups and"),
    (state(lambda saved: saved["optimizer"].update(groups=[5])), "expected its class, groups and"),
    (each_parameter(slots=[3]), "expected its class, groups and"),
    (each_parameter(slots=["exp_avg"]), "belongs to no parameter"),
    (of_group(betas="abc"), "betas is 'abc', expected something like [0.9, 0.95]"),
    (model(n_layer=10**6), "model.n_layer is 1000000 there"),
]


def copy_of(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(
    ("command", "damage", "words"),
    [*(("sample", *case) for case in SAMPLED), *(("train", *case) for case in TRAINED_ON)],
)
def test_a_checkpoint_that_no_run_has_saved(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    damage: Damage,
    words: str,
) -> None:
    damage(copy_of(run, tmp_path))
    calls = {
        "sample": lambda: main(["sample", str(tmp_path / "run")]),
        "train": lambda: train(tmp_path / "run", run.parent / "data"),
    }
    refused(capsys, calls[command], words)


def test_positions_at_which_no_token_stands_take_no_memory(run: Path, tmp_path: Path) -> None:
    model(block_size=10**15)(copy_of(run, tmp_path))
    assert main(["sample", str(tmp_path / "run"), "--tokens", "2"]) == 0


CONTROLS = "\x1bc\x07EVIL\r\n\x9b31m\x7f\u202e"
"""Clears the screen, rings, goes back, begins another line, colours, deletes, reverses."""


def is_plain(text: str) -> bool:
    """Nothing in it steers a terminal."""
    return all(c.isprintable() or c in "\n\t" for c in text)


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("train", state(lambda saved: saved["optimizer"].update({"class": CONTROLS}))),
        ("sample", state(lambda saved: saved.update(tokenizer=CONTROLS))),
        ("sample", file(text(f'{{"manifest": {{"{CONTROLS}": 1}}}}'))),
    ],
)
def test_what_a_checkpoint_says_does_not_steer_the_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, damage: Damage
) -> None:
    test_a_checkpoint_that_no_run_has_saved(run, tmp_path, capsys, command, damage, "")


# -- data -----------------------------------------------------------------------------------------


def in_meta(**changes: Any) -> Damage:
    return lambda data: rewrite_json(data / "meta.json", lambda meta: meta.update(changes))


def wide(data: Path) -> None:
    """A vocabulary of which the embedding alone would take terabytes."""
    size = (data / "train.bin").stat().st_size // 4 * 4
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(b"\0" * size)

    def change(meta: dict[str, Any]) -> None:
        digest = hashlib.sha256(b"\0" * size).hexdigest()
        meta.update(vocab_size=4 * 10**9, dtype="uint32")
        meta["tokens"] = dict.fromkeys(("train", "val"), size // 4)
        for name in ("train.bin", "val.bin"):
            meta["files"][name] = {"num_bytes": size, "sha256": digest}

    rewrite_json(data / "meta.json", change)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: pipe(data / "meta.json"), "is not a regular file"),
        (lambda data: pipe(data / "train.bin"), "is not a regular file"),
        (in_meta(unigram_entropy_nats=float("nan")), "NaN where a finite number belongs"),
        (in_meta(tokens={CONTROLS: 1}), "EVIL"),
        (wide, "parameters takes 1.02e+03 GB at least, and this host has"),
    ],
)
def test_data_that_are_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, words: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(run.parent / "data", data)
    damage(data)
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
