"""A measurement from request to record, as values; `gradsync.commands.cli.experiment` runs it.

Experiment(options, variants, measure, metrics)

variants   from the command's options: what to measure, or an error
measure    a rank's part, from JSON to JSON, on a launcher's ranks or on new ones
metrics    the results as text, JSON, CSV, picture and `record.json`
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from gradsync.core.files import json_text, write_result
from gradsync.errors import ConfigError, GradsyncError, RunError
from gradsync.runtime.machine import cpu_model, total_bytes, usable_cores

if TYPE_CHECKING:
    from gradsync.world import World

_HEAD = ("environment", "command", "benchmark")
_PLACES = ("csv", "out", "save", "as_json", "dry_run")
"""Options that do not change what is measured."""

T = TypeVar("T")
Ask = Callable[[Any, int], dict[str, Any]]
"""`ask(work, ranks)`: what rank 0 measured for `work`, a dataclass, on a launcher's ranks or on new
ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Results, in the form that each output needs."""

    environment: Mapping[str, Any]  # see `environment`
    data: Mapping[str, Any]  # for `--json` and the record
    show: Callable[[IO[str]], None]  # prints it for people
    command: str = ""  # for the same measurement; usually as typed, without output flags
    samples: Any = None  # for the record alone
    csv: Callable[[], str] | None = None
    keep: Callable[[], str] | None = None  # saves what other commands use, last; returns where
    code: int = 0  # exit code


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A command that measures."""

    command: tuple[str, ...]  # as typed
    options: type  # its flags: a dataclass
    measure: str  # `module:function`; imported by ranks only
    variants: Callable[[Any, World], Any]  # from options and world; raises `ConfigError`
    metrics: Callable[[Any, Any, Any, World], Findings]  # the third is what `measure` returned
    collect: Callable[[Any, Any, World, Ask], Any] = lambda options, variants, _, ask: ask(
        variants, options.world_size
    )  # what ranks measured, on rank 0
    dry: Callable[[Any], Any] = asdict  # what `--dry-run` prints of the variants, as JSON


def command_of(options: Any, command: Sequence[str]) -> str:
    """The command line for the same measurement, without its output flags."""
    words = ["gradsync", *command]
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name not in _PLACES and value != entry.default:
            words += [flag_of(entry.name)] if value is True else [flag_of(entry.name), str(value)]
    return shlex.join(words)


def flag_of(name: str) -> str:
    """An option as users type it."""
    return "--" + name.replace("_", "-")


def check_least(options: Any, **least: int) -> None:
    """Refuse options that are below their minimum; None is always allowed."""
    for name, number in least.items():
        if (value := getattr(options, name)) is not None and value < number:
            raise ConfigError(f"{flag_of(name)} must be at least {number}; got {value}")


def check_alone(world: World, command: str) -> None:
    """Refuse a launcher's ranks if a measurement starts its own."""
    if world.is_distributed:
        raise ConfigError(
            f"{command} starts ranks itself: run it as one process, without {world.launcher}; "
            "bench sync measures the ranks that a launcher started"
        )


def taken(kind: type[T], options: Any, **others: Any) -> T:
    """A `kind` built from the options that match its fields, overridden by `others`."""
    names = [entry.name for entry in fields(kind) if hasattr(options, entry.name)]  # type: ignore[arg-type]
    return kind(**{name: getattr(options, name) for name in names} | others)


def names_in(text: str) -> tuple[str, ...]:
    """Words separated by commas, without duplicates."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def environment(*, world_size: int, threads: int) -> dict[str, Any]:
    """Facts that a reader needs to judge the figures; read before anything is measured."""
    import torch
    import torch.distributed as dist

    has_group = dist.is_available() and dist.is_initialized()
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_at_start": round(os.getloadavg()[0], 2),  # of the last minute
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


def write_record(
    folder: Path,
    *,
    name: str,
    command: str,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Path:
    """Write `folder/record.json` atomically; returns its path."""
    assert not set(_HEAD) & set(data), "a key of the head in the data"
    document = {"environment": dict(environment), "command": command, "benchmark": name, **data}
    path = folder / "record.json"
    write_result(path, json_text(document))
    return path


def failed(error: GradsyncError) -> dict[str, Any]:
    """A result that carries an error which all ranks found: one process reports it."""
    return {"failed": str(error), "exit_code": error.exit_code}


def raise_failed(result: Mapping[str, Any]) -> None:
    """Raise what `failed` put into a result, as a `ConfigError` or a `RunError`."""
    if "failed" in result:
        kind = ConfigError if result["exit_code"] == ConfigError.exit_code else RunError
        raise kind(result["failed"])


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass `kind` from what `dataclasses.asdict` and JSON made of it. Fields may be
    dataclasses, and tuples of one type. Other keys, of an older record, are left out."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], data[name]) for name in hints if name in data})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return from_json(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], each) for each in value)
    return value
