"""One optimizer step, played with ranks that are not equally fast; pure.

    rank r     leaf ... leaf │ backward: bucket 0 full, bucket 1 full, ...
    channel                  │      [bucket 0][bucket 1]  ...          one at a time, in order
    all                      │                              agree, update, gather weights

A bucket starts when the last rank has filled it and the channel is free. A leaf takes its usual
time, times one of the measured ratios, each as likely (the bootstrap). All ranks are drawn,
thousands of them; but of those that wait for each other only the ones that may be last in something
count, which are few. A pipeline's stages wait for their neighbours' messages:

    gpipe    F F F F . . B B B B          all forwards first (arXiv 1811.06965)
    1f1b     F F F B F B . B . B          at most as many leaves open as stages follow
                                          (arXiv 1806.03377, 2104.04473)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from gradsync.plan.timing.step import StepCosts, channel_end

_EXACT_LEAVES = 16
"""Sums of more draws are drawn at once, as normal (central limit theorem)."""
_POOL = 16
"""Pipelines that are played; where there are more, each of the others is like one of these."""

Work = tuple[Literal["forward", "backward"], int]
"""Which pass of which leaf."""


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
        self._mean, square = (
            sum(chance * ratio**k for chance, ratio in zip(chances, self._jitter, strict=True))
            for k in (1, 2)
        )
        self._deviation = math.sqrt(max(0.0, square - self._mean**2))
        self._even = self._jitter[0] == self._jitter[-1]

    def slowest(self, ranks: int = 1) -> float:
        """The greatest ratio of one leaf over so many ranks, by inversion."""
        place = self._rng.random() ** (self._power / ranks) * len(self._jitter)
        return self._jitter[min(int(place), len(self._jitter) - 1)]

    def total(self, leaves: int) -> float:
        """The sum of so many leaves' ratios."""
        if self._even:
            return leaves * self._jitter[0]
        if leaves <= _EXACT_LEAVES:
            return sum(self.slowest() for _ in range(leaves))
        return self._rng.gauss(leaves * self._mean, leaves**0.5 * self._deviation)

    def latest(self, ranks: int, leaves: int) -> list[tuple[float, float]]:
        """The ranks that may be last: (ratios of all leaves but the last, ratio of the last).

        A rank that is behind another one in both is last in everything.
        """
        if self._even:
            return [((leaves - 1) * self._jitter[0], self._jitter[0])]
        if leaves == 1:
            return [(0.0, self.slowest(ranks))]
        drawn = [(self.slowest(), self.total(leaves - 1)) for _ in range(ranks)]
        found: list[tuple[float, float]] = []
        for last, before in sorted(drawn, reverse=True):
            if not found or before > found[-1][0]:
                found.append((before, last))
        return found

    def slowest_total(self, ranks: int, leaves: int) -> float:
        """The greatest sum of so many leaves' ratios over ranks that do not meet meanwhile."""
        return self.total(leaves) if self._even else max(self.total(leaves) for _ in range(ranks))


def step_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Seconds of one step; the mean of one where ranks do not meet in each."""
    end_s = costs.copy_s + costs.agree_s + costs.update_s + costs.after_s
    if costs.every > 1:
        return _round_s(costs, stragglers) / costs.every
    if costs.stages > 1:  # the slowest replica, then what of its buckets is still on its way
        slowest = max(replica_s(costs, stragglers) for _ in range(min(costs.replicas, _POOL)))
        ranks = [(slowest - costs.backward_s, 1.0)]
        return costs.last_leaf_wait_s - costs.leaf_wait_s + _meeting_s(costs, ranks) + end_s
    if costs.leaves_meet:
        ratios = [stragglers.slowest(costs.replicas) for _ in range(costs.leaves)]
        latest = [(sum(ratios[:-1]), ratios[-1])]
    else:
        latest = stragglers.latest(costs.replicas, costs.leaves)
    waits = (costs.leaves - 1) * costs.leaf_wait_s + costs.last_leaf_wait_s
    ranks = [(before * costs.leaf_s + last * costs.forward_s, last) for before, last in latest]
    return waits + _meeting_s(costs, ranks) + end_s


def _meeting_s(costs: StepCosts, ranks: Sequence[tuple[float, float]]) -> float:
    """When all buckets are through and all have computed.

    Args:
        costs: of the step.
        ranks: (when its last backward begins, how much longer than usual it takes).
    """
    computed = max(begin + ratio * costs.backward_s for begin, ratio in ranks)
    if not costs.hides:
        full = [replace(sending, ready_s=computed) for sending in costs.sendings]
    else:
        full = [
            replace(each, ready_s=max(begin + ratio * each.ready_s for begin, ratio in ranks))
            for each in costs.sendings
        ]
    return max(computed, channel_end(sorted(full, key=lambda sending: sending.ready_s)))


def _round_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Ranks that step alone, up to the end of their meeting."""
    leaves = costs.every * costs.leaves
    alone = stragglers.slowest_total(costs.replicas, leaves) * costs.leaf_s
    waits = leaves * costs.leaf_wait_s
    meeting = sum(sending.cost_s for sending in costs.sendings) + costs.agree_s
    return alone + waits + costs.every * (costs.update_s + costs.copy_s) + meeting


def order_of(schedule: str, stage: int, stages: int, leaves: int) -> list[Work]:
    """The order in which a pipeline's stage works."""
    ahead = leaves if schedule == "gpipe" else min(leaves, stages - stage)
    order: list[Work] = [("forward", leaf) for leaf in range(ahead)]
    for leaf in range(leaves):
        order.append(("backward", leaf))
        if ahead + leaf < leaves:
            order.append(("forward", ahead + leaf))
    return order


def replica_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """When the last stage of one replica has done its last backward, seconds."""
    stages, last = range(costs.stages), costs.stages - 1
    orders = [order_of(costs.schedule, stage, costs.stages, costs.leaves) for stage in stages]
    places, free = [0] * costs.stages, [0.0] * costs.stages
    # The first stage has its inputs.
    arrived: dict[tuple[int, Work], float] = {
        (0, ("forward", leaf)): 0.0 for leaf in range(costs.leaves)
    }
    while any(places[stage] < len(orders[stage]) for stage in stages):
        for stage in stages:
            order = orders[stage]
            while places[stage] < len(order) and (stage, order[places[stage]]) in arrived:
                kind, leaf = work = order[places[stage]]
                forward = kind == "forward"
                usual_s = costs.forward_s if forward else costs.backward_s
                busy_s = usual_s * stragglers.slowest() + (costs.leaf_wait_s if forward else 0.0)
                free[stage] = max(free[stage], arrived[stage, work]) + busy_s
                places[stage] += 1
                if forward and stage == last:  # it turns around without a message
                    arrived[stage, ("backward", leaf)] = free[stage]
                else:
                    arrived[stage + (1 if forward else -1), work] = free[stage] + costs.hop_s
    return max(free)
