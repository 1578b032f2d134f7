"""How fast each of many ranks is, drawn from what was measured; pure.

A leaf takes its usual time, times one of the measured ratios, each as likely (the bootstrap). All
ranks are drawn, thousands of them; but of those that wait for each other only the ones that may be
last in something count, which are few.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

_EXACT_LEAVES = 16
"""Sums of more draws are drawn at once, as normal (central limit theorem)."""


class Stragglers:
    """Draws durations.

    Args:
        jitter: durations over the usual one.
        rng: the same seed gives the same durations.
        together: ranks that meet within each leaf and so count as one, as slow as the slowest.
    """

    def __init__(self, jitter: Sequence[float], rng: random.Random, *, together: int = 1) -> None:
        self._jitter = sorted(jitter)
        self._rng = rng
        self._power = 1 / together
        count = len(self._jitter)
        # How likely each ratio is to be the greatest of `together` draws.
        below = [(place / count) ** together for place in range(count + 1)]
        chances = [high - low for low, high in pairwise(below)]
        moments = [
            sum(chance * ratio**k for chance, ratio in zip(chances, self._jitter, strict=True))
            for k in (1, 2)
        ]
        self._mean = moments[0]
        self._deviation = math.sqrt(max(0.0, moments[1] - moments[0] ** 2))
        self._even = self._jitter[0] == self._jitter[-1]

    def one(self) -> float:
        """One leaf's ratio: the greatest of `together` draws, by inversion."""
        return self.slowest(1)

    def slowest(self, ranks: int) -> float:
        """The greatest ratio of one leaf over so many ranks."""
        place = self._rng.random() ** (self._power / ranks) * len(self._jitter)
        return self._jitter[min(int(place), len(self._jitter) - 1)]

    def total(self, leaves: int) -> float:
        """The sum of so many leaves' ratios."""
        if self._even:
            return leaves * self._jitter[0]
        if leaves <= _EXACT_LEAVES:
            return sum(self.one() for _ in range(leaves))
        return self._rng.gauss(leaves * self._mean, leaves**0.5 * self._deviation)

    def latest(self, ranks: int, leaves: int) -> list[tuple[float, float]]:
        """Of so many ranks those that may be last: (ratios of all leaves but the last, ratio of the
        last). Who is behind another one in both is last in everything.
        """
        if self._even:
            return [((leaves - 1) * self._jitter[0], self._jitter[0])]
        if leaves == 1:
            return [(0.0, self.slowest(ranks))]
        drawn = sorted(((self.one(), self.total(leaves - 1)) for _ in range(ranks)), reverse=True)
        found: list[tuple[float, float]] = []
        for last, before in drawn:
            if not found or before > found[-1][0]:
                found.append((before, last))
        return found

    def slowest_total(self, ranks: int, leaves: int) -> float:
        """The greatest sum of so many leaves' ratios over ranks that do not meet meanwhile."""
        if self._even:
            return leaves * self._jitter[0]
        return max(self.total(leaves) for _ in range(ranks))
