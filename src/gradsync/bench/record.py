"""A measurement on disk: one `record.json` in a folder, complete or not there at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError, RunError

_HEAD = ("environment", "command", "benchmark")


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be written, before anything is measured for it.

    Args:
        option: how the user named it, such as "--out".
        folder: need not exist.

    Raises:
        ConfigError: it is a file, or may not be written or made.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{option} {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: {there} may not be written")


def write_record(
    folder: Path,
    *,
    name: str,
    command: str,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Path:
    """Write `folder/record.json`, in the place of an older one; returns its path.

    The keys `environment`, `command` and `benchmark` (which is `name`) come first, then those of
    `data`.

    Args:
        folder: made when it is missing.
        name: of the benchmark.
        command: what to type for the same measurement.
        environment: see `environment.environment`.
        data: what JSON can write; no NaN and no infinity.

    Raises:
        RunError: it could not be written.
    """
    assert not set(_HEAD) & set(data), "a key of the head in the data"
    document = {"environment": dict(environment), "command": command, "benchmark": name, **data}
    path = folder / "record.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(document))
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror}") from error
    return path


def json_text(document: Mapping[str, Any]) -> str:
    """Indented JSON with a line's end, in which a list of numbers takes one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    return re.sub(r"\[[-\d.eE,\s+]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def write_text(path: Path, text: str) -> None:
    """Put `text` into the file `path` in one step: a reader sees the old one or all of this one.

    What cannot be replaced is written into: whatever a link names, a pipe, /dev/stdout, a file in a
    folder that may not be written.

    Raises:
        OSError: as the file system says.
    """
    replaceable = not path.is_symlink() and (path.is_file() or not path.exists())
    if not replaceable or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
