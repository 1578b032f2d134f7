"""Slurm's compressed lists, expanded in Python: containers often lack `scontrol`.

    n[1-3,07],gpu-[01-02]-x   ->  n1 n2 n3 n07 gpu-01-x gpu-02-x
    4(x2),3                   ->  4 4 3

The text comes from the environment: it is checked and bounded before it is expanded.
"""

from __future__ import annotations

import itertools
import math
import re

from gradsync.errors import LaunchError

MAX_HOSTS = 65_536
"""Largest list that is expanded, in hosts; longer ones are an error."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def check_host(name: str) -> str:
    """`name` if it can be a host name, and so is safe to pass on and to print."""
    if _HOST.fullmatch(name) is None:
        raise LaunchError(f"{name[:80]!r} is not a host name")
    return name


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names of a list such as `n[1-3,07],gpu-[01-02]-x`, in order.

    Several brackets in one name multiply; the last one varies fastest. A range keeps the width of
    its first number: `[08-10]` gives 08, 09, 10.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)  # cut at the commas outside brackets
    if not items or ",".join(items) != text:
        raise LaunchError(f"{text[:80]!r} is not a host list such as 'n[1-3],m7'")
    hosts: list[str] = []
    for item in items:
        pieces = re.split(r"\[([0-9,-]+)\]", item)  # plain text and ranges in turn
        if "[" in "".join(pieces[::2]):
            raise LaunchError(f"{text[:80]!r} is not a host list: cannot read {item[:80]!r}")
        choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(pieces)]
        _check_size(len(hosts) + math.prod(map(len, choices)), text)
        hosts += [check_host("".join(parts)) for parts in itertools.product(*choices)]
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `4(x2),3`: how many tasks run on each host."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise LaunchError(f"{text[:80]!r} is not a list of task counts such as '4(x2),3'")
        times = int(match[2] or 1)
        _check_size(len(counts) + times, text)
        counts += [int(match[1])] * times
    return tuple(counts)


def _check_size(size: int, text: str) -> None:
    if size > MAX_HOSTS:
        raise LaunchError(f"{text[:80]!r} stands for more than {MAX_HOSTS:,} hosts")


def _numbers(ranges: str, text: str) -> list[str]:
    """Each number that `ranges` stands for."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise LaunchError(f"{text[:80]!r} is not a host list: bad range {piece[:80]!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise LaunchError(f"{text[:80]!r} is not a host list: {piece!r} runs backwards")
        _check_size(len(numbers) + high - low + 1, text)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return numbers
