"""Slurm's compressed lists, expanded in Python: containers often lack `scontrol`.

    n[1-3,07],gpu-[01-02]-x   ->  n1 n2 n3 n07 gpu-01-x gpu-02-x
    4(x2),3                   ->  4 4 3

The text comes from the environment, so it is checked and bounded before it is expanded.
"""

from __future__ import annotations

import itertools
import math
import re

from gradsync.errors import LaunchError

MAX_HOSTS = 65_536
"""Largest list that is expanded, in hosts; longer ones are an error."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def check_host(name: str) -> str:
    """`name` if it can be a host name, so that it is safe to pass on and to print."""
    if _HOST.fullmatch(name) is None:
        raise LaunchError(f"{name[:80]!r} is not a host name")
    return name


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names of a list such as `n[1-3,07],gpu-[01-02]-x`, in order.

    Several brackets in one name multiply, the last one running fastest. A range keeps the width of
    its first number: `[08-10]` gives 08, 09, 10.

    Args:
        text: a host list as Slurm and Flux write it.
    """
    hosts: list[str] = []
    for item in _split_items(text):
        choices = [_choices(prefix, ranges, text) for prefix, ranges in _parts(item, text)]
        _check_size(len(hosts) + math.prod(map(len, choices)), text)
        hosts += [check_host("".join(pieces)) for pieces in itertools.product(*choices)]
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


def _split_items(text: str) -> list[str]:
    """Cut at the commas outside brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise LaunchError(f"{text[:80]!r} is not a host list such as 'n[1-3],m7'")
    return items


def _parts(item: str, text: str) -> list[tuple[str, str]]:
    """`a[1-2]b[3]c` as pairs of plain text and the ranges after it ("" for none)."""
    parts: list[tuple[str, str]] = []
    position = 0
    while position < len(item):
        match = _PART.match(item, position)
        if match is None or match.end() == position:
            raise LaunchError(f"{text[:80]!r} is not a host list: cannot read {item[:80]!r}")
        parts.append((match[1], match[2] or ""))
        position = match.end()
    return parts


def _choices(prefix: str, ranges: str, text: str) -> list[str]:
    """`prefix` followed by each number that `ranges` stands for."""
    if not ranges:
        return [prefix]
    names: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise LaunchError(f"{text[:80]!r} is not a host list: bad range {piece[:80]!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise LaunchError(f"{text[:80]!r} is not a host list: {piece!r} runs backwards")
        _check_size(len(names) + high - low + 1, text)
        names += [f"{prefix}{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return names
