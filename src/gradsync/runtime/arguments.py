"""A command's options from its arguments. tyro reads them; an error is one line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import groupby
from typing import Any, TypeVar, get_type_hints

import tyro

from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime import environ
from gradsync.runtime.bounds import check_numbers

T = TypeVar("T")


def parse(
    options: type[T], argv: Sequence[str], command: str, *, takes: str = "", **more: Any
) -> T:
    """Parse `argv` into the dataclass `options`; the last of several equal flags counts.

    Args:
        command: the command as typed, such as "bench sync".
        takes: words after the command in its usage line.
        more: passed to `tyro.cli`.

    Raises:
        ConfigError: an unknown flag (the message names the nearest), or an invalid value.
        SystemExit: 0 for `--help`.
    """
    asks = not {"-h", "--help"}.isdisjoint(argv)
    box = io.StringIO()
    try:
        with (
            environ.exported({} if asks else {"COLUMNS": "10000"}),  # no line of an error is cut
            contextlib.redirect_stderr(box),
        ):
            parsed, unknown = tyro.cli(
                options,
                args=argv,
                prog=f"gradsync {command}{takes}",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed),
                return_unknown_args=True,
                **more,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _refusal(stop, box.getvalue(), command) from None
    sys.stderr.write(box.getvalue())
    if unknown:
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        wrong = f"unknown options: {', '.join(names)}" if names else ""
        wrong = wrong or f"unexpected argument: {' '.join(unknown)}"
        hint = _nearest(names[0], list(_flags(options))) if names else ""
        raise ConfigError(f"{wrong}{hint} (gradsync {command} --help lists the options)")
    check_numbers(parsed, lambda name: f"--{name.replace('_', '-')}")
    return parsed


def _refusal(stop: SystemExit, box: str, command: str) -> GradsyncError:
    """The cause of `stop`: our own error as raised, else the first lines in tyro's box."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, GradsyncError):
            return error
        error = error.__cause__ or error.__context__
    rows = [row.strip("│ ") for row in box.splitlines()[1:]]  # the first one is the title
    parts = groupby(rows, lambda row: bool(row.strip("─-")))  # between rules and empty lines
    words = next((" ".join(part) for is_text, part in parts if is_text), str(stop))
    return ConfigError(f"{words} (gradsync {command} --help lists the options)")


def _nearest(name: str, flags: Sequence[str]) -> str:
    """A hint at the flag that is most like `name`, whole or by its last part."""
    name = name.replace("_", "-")
    same = [flag for flag in flags if flag.rpartition(".")[2] == name.lstrip("-")]
    near = same or get_close_matches(name, flags, n=1)
    return f"; perhaps you meant {near[0]}" if near else ""


def _flags(options: type, prefix: str = "--") -> Iterator[str]:
    """The flags of a dataclass and of those nested in it."""
    for field, hint in get_type_hints(options, include_extras=True).items():
        given = [each.name for each in getattr(hint, "__metadata__", ()) if hasattr(each, "name")]
        name = f"{prefix}{next(filter(None, given), field).replace('_', '-')}"
        if is_dataclass(hint):
            yield from _flags(hint, f"{name}.")  # pyrefly: ignore[bad-argument-type]
        else:
            yield name
