"""A measurement on disk: one `record.json` in a folder, complete or not there at all."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gradsync.core.files import json_text, write_text
from gradsync.errors import ConfigError, GradsyncError, RunError
from gradsync.runtime.machine import cpu_model, total_bytes, usable_cores

_HEAD = ("environment", "command", "benchmark")

T = TypeVar("T")


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
        environment: see the function `environment`.
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


def environment(*, world_size: int, threads: int) -> dict[str, Any]:
    """Facts that a reader needs to judge the figures, as JSON; taken before anything is measured.

    Args:
        world_size: ranks that are measured.
        threads: intra-op threads of a rank.

    Returns:
        `date`, `cpu`, `cores` (that this process may use), `load_at_start` (of the last minute),
        `memory_gib`, `world_size`, `threads_per_rank`, `cpu_capability`, `backend` (of the process
        group; none without one), `accelerator` (its name, or None), `torch`, `python`, `system`.
    """
    import torch
    import torch.distributed as dist

    has_group = dist.is_available() and dist.is_initialized()
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "world_size": world_size,
        "threads_per_rank": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": str(dist.get_backend()) if has_group else "none",
        "accelerator": torch.cuda.get_device_name() if has_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def failed(error: GradsyncError) -> dict[str, Any]:
    """An error that all ranks found alike, as their result: one process speaks for all."""
    return {"failed": str(error), "exit_code": error.exit_code}


def raise_failed(result: Mapping[str, Any]) -> None:
    """Raise what `failed` put into a result.

    Raises:
        ConfigError: options that do not go together.
        RunError: another error.
    """
    if "failed" in result:
        kind = ConfigError if result["exit_code"] == ConfigError.exit_code else RunError
        raise kind(result["failed"])


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass `kind` out of what `dataclasses.asdict` and JSON made of it.

    Args:
        kind: its fields may be dataclasses, and tuples of one type, in turn.
        data: as JSON has it, with lists for tuples.

    Raises:
        ConfigError: whatever `kind` refuses.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return from_json(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], each) for each in value)
    return value
