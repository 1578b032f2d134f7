"""A measurement on disk: one `record.json` in a folder, complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError, RunError
from gradsync.runtime.text_file import json_text, write_text

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
