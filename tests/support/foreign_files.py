"""A small run and its data, and ways to change their files so that all checksums still fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradsync.checkpoint.manifest import seal
from gradsync.commands.cli.main import main
from gradsync.commands.prepare.prepare import prepare

FLAGS = (
    *("--device", "cpu", "--dtype", "fp32", "--sample-tokens", "0", "--eval.max-tokens", "16"),
    *("--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--seq-len", "8"),
    *("--micro-batch-size", "2", "--tokens-per-update", "32"),
)


def make_run(home: Path) -> Path:
    """`home/run` with one checkpoint, of step 1, trained on `home/data`."""
    text = home / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    prepare([text], home / "data", val_fraction=0.2)
    assert train(home / "run", home / "data", steps=1) == 0
    return home / "run"


def train(out: Path, data: Path, *more: str, steps: int = 2) -> int:
    """The command, on one rank; goes on where `out` has a checkpoint."""
    flags = ("--data", str(data), "--out", str(out), "--steps", str(steps))
    return main(["train", "tiny", *FLAGS, *flags, *more])


def rewrite_manifest(checkpoint: Path) -> None:
    """A manifest that fits the files as they are now."""
    body = json.loads((checkpoint / "manifest.json").read_bytes())["manifest"]
    for name in body["files"]:
        if (checkpoint / name).is_file():
            content = (checkpoint / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            body["files"][name] = {"size": len(content), "sha256": digest}
    (checkpoint / "manifest.json").write_bytes(seal(body))


def rewrite_json(path: Path, change: Callable[[Any], Any]) -> None:
    """The object in a file, changed."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def replace_header(path: Path, text: bytes) -> None:
    """Another text for the header; the data stay."""
    content = path.read_bytes()
    text += b" " * (-len(text) % 8)
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
