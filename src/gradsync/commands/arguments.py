"""A command's options from its arguments. tyro reads them; an error is one line."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import tyro

from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime import environ
from gradsync.runtime.bounds import whole_number

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
            parsed = tyro.cli(
                options,
                args=argv,
                prog=f"gradsync {command}{takes}",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed),
                **more,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _refusal(stop, box.getvalue(), command) from None
    sys.stderr.write(box.getvalue())
    return parsed


def flag_of(name: str) -> str:
    """An option as users type it."""
    return "--" + name.replace("_", "-")


def check_least(options: Any, **least: int) -> None:
    """Refuse options that are below their minimum; None is always allowed."""
    for name, number in least.items():
        if (value := getattr(options, name)) is not None and value < number:
            raise ConfigError(f"{flag_of(name)} must be at least {number}; got {value}")


def names_in(text: str) -> tuple[str, ...]:
    """Words separated by commas, without duplicates."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers_in(flag: str, text: str, most: int) -> list[int]:
    """Whole numbers from 1 to `most`, separated by commas."""
    numbers = [whole_number(word, most) for word in names_in(text)]
    if not all(numbers):
        raise ConfigError(
            f"{flag} takes numbers of ranks such as 2,8, at most {most}; got {text[:80]!r}"
        )
    return [number for number in numbers if number]


def _refusal(stop: SystemExit, box: str, command: str) -> GradsyncError:
    """The cause of `stop`: our own error as raised, else what tyro's box says first."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, GradsyncError):
            return error
        error = error.__cause__ or error.__context__
    text = " ".join(re.sub("[│─╭╰╮╯]|-{3,}", " ", box.partition("\n")[2]).split())
    said, _, more = re.sub(" For full helptext.*", "", text).partition(" Arguments similar to ")
    said, _, nearest = said.partition(" Perhaps you meant: ")
    flags = re.findall(r"--[\w.-]+", f"{said} {nearest or more}")
    near = get_close_matches(flags[0], flags[1:], n=1, cutoff=0) if nearest or more else ()
    hint = f"; perhaps you meant {near[0]}" if near else ""
    said = said.partition(" Argument helptext")[0]
    return ConfigError(f"{said}{hint} (gradsync {command} --help lists the options)")
