"""Medians, quartiles and ratios of repeated measurements; plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 4000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the middle half of some measurements lies, in their own unit."""

    median: float
    """Half of the measurements are at most this."""
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int
    """Number of measurements."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of 100 are at most; between two of them on the straight line.

    Args:
        values: at least one, in any order.
        percent: 0 (the least) to 100 (the greatest).
    """
    assert values, "no values"
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    low, median, high = (percentile(values, percent) for percent in (25, 50, 75))
    return Spread(median=median, low=low, high=high, count=len(values))


def ratios(values: Sequence[float], ideal: Sequence[float]) -> list[float]:
    """`values` over `ideal`, each round by the same round: what disturbed a round disturbed both.

    Args:
        values: one per round.
        ideal: one per round, none of them 0.

    Raises:
        ValueError: not the same number of rounds.
    """
    return [value / best for value, best in zip(values, ideal, strict=True)]


def interval(values: Sequence[float], *, doubt: float = 0.05) -> tuple[float, float]:
    """Confidence interval of the median, by the bootstrap over rounds (Efron 1979).

    The same values give the same interval.

    Args:
        values: one per round.
        doubt: 0.05 for 95 %.
    """
    import numpy as np

    drawn = np.random.default_rng(_SEED)
    places = drawn.integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[places], axis=1)
    low, high = np.quantile(medians, [doubt / 2, 1 - doubt / 2])
    return float(low), float(high)
