"""From which number of ranks on something changes, in words; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

Efficiency = Callable[[str, int], float]
"""Of a strategy on so many ranks."""

HALF = 0.5
_CLEAR = 1.02
"""What is less than 2 % faster is as fast."""
_WORTH = 0.1
"""Below that efficiency nobody asks which of two is ahead."""


def crossovers(
    names: Sequence[str],
    losing: Sequence[str],
    sizes: Sequence[int],
    efficiency: Efficiency,
    *,
    over: str,
) -> list[str]:
    """What a reader of the table should see.

    Args:
        names: strategies, as they are called.
        losing: those that do not keep one rank's numbers.
        sizes: numbers of ranks to look at, ascending, several; finer than the table's.
        efficiency: asked for every name and size.
        over: the network, in a word.
    """
    exact = [name for name in names if name not in losing]
    found = [*_leads(exact, sizes, efficiency), *_falls(names, sizes, efficiency)]
    return [*found, _survivors(names, sizes, efficiency, over)]


def _leads(names: Sequence[str], sizes: Sequence[int], efficiency: Efficiency) -> list[str]:
    """For each pair that changes places and stays so."""
    lines = []
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            ahead = [_ahead(efficiency(first, n), efficiency(second, n)) for n in sizes]
            decided = [(n, sign) for n, sign in zip(sizes, ahead, strict=True) if sign]
            if not decided or decided[0][1] == decided[-1][1]:
                continue
            sign = decided[-1][1]
            start = _last_run(decided, sign)
            winner, loser = (first, second) if sign > 0 else (second, first)
            if efficiency(winner, start) >= _WORTH:
                lines.append(f"from {start} ranks on, {winner} beats {loser}")
    return lines


def _last_run(decided: Sequence[tuple[int, int]], sign: int) -> int:
    """Where the last run of equal signs begins."""
    run = takewhile(lambda entry: entry[1] == sign, reversed(decided))
    return list(run)[-1][0]


def _ahead(first: float, second: float) -> int:
    if first > _CLEAR * second:
        return 1
    return -1 if second > _CLEAR * first else 0


def _falls(names: Sequence[str], sizes: Sequence[int], efficiency: Efficiency) -> list[str]:
    """Where each goes below half for good."""
    falling: dict[int, list[str]] = {}
    for name in names:
        above = [efficiency(name, n) >= HALF for n in sizes]
        if any(above) and not above[-1]:
            start = len(above) - above[::-1].index(True)
            falling.setdefault(sizes[start], []).append(name)
    return [
        f"from {size} ranks on, {_list(those)} {'are' if len(those) > 1 else 'is'} below 50 %"
        for size, those in sorted(falling.items())
    ]


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _survivors(
    names: Sequence[str], sizes: Sequence[int], efficiency: Efficiency, over: str
) -> str:
    most = sizes[-1]
    alive = [name for name in names if efficiency(name, most) >= HALF]
    where = f"on {most} ranks over {over}"
    if len(alive) == len(names):
        return f"{where}, all stay above 50 %"
    if not alive:
        return f"{where}, nothing stays above 50 %"
    return f"{where}, only {_list(alive)} {'stay' if len(alive) > 1 else 'stays'} above 50 %"
