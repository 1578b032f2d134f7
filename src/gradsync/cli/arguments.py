"""A command's options from its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from gradsync.runtime.bounds import check_numbers

PAIRED = ("train", "sample", "verify", "bench", "tune", "plan")
"""Commands of which each switch has its opposite, `--no-NAME`."""

T = TypeVar("T")


def parse(options: type[T], argv: Sequence[str], command: str) -> T:
    """The dataclass `options` as `argv` has it; the last of several equal flags counts.

    Args:
        command: as typed, such as "bench sync".

    Raises:
        ConfigError: a number that cannot be used whatever it is for.
        SystemExit: 2 for a bad flag (the message names the nearest), 0 for `--help`.
    """
    parsed = tyro.cli(
        options,
        args=argv,
        prog=f"gradsync {command}",
        config=() if command.split(maxsplit=1)[0] in PAIRED else (tyro.conf.FlagCreatePairsOff,),
    )
    check_numbers(parsed, lambda name: f"--{name.replace('_', '-')}")
    return parsed
