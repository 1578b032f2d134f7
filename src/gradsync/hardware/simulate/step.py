"""One optimizer step as events; pure.

    rank r     leaf ... leaf │ backward: bucket 0 full, bucket 1 full, ...
    channel                  │      [bucket 0][bucket 1]  ...          one at a time, in order
    all                      │                              agree, update, gather weights

A bucket starts when the last rank has filled it and the channel is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradsync.hardware.simulate.events import Channel, EventLoop
from gradsync.hardware.simulate.pipeline import replica_s
from gradsync.hardware.simulate.stragglers import Stragglers
from gradsync.hardware.timing.step_costs import Sending, StepCosts

_POOL = 16
"""Pipelines that are played; where there are more, each of the others is like one of these."""


def step_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Seconds of one step; the mean of one where ranks do not meet in each."""
    if costs.every > 1:
        return _round_s(costs, stragglers) / costs.every
    if costs.stages > 1:
        return _pipeline_s(costs, stragglers)
    waits = (costs.leaves - 1) * costs.leaf_wait_s + costs.last_leaf_wait_s
    if costs.leaves_meet:
        ratios = [stragglers.slowest(costs.replicas) for _ in range(costs.leaves)]
        latest = [(sum(ratios[:-1]), ratios[-1])]
    else:
        latest = stragglers.latest(costs.replicas, costs.leaves)
    ranks = [(before * costs.leaf_s + last * costs.forward_s, last) for before, last in latest]
    return waits + _meeting_s(costs, ranks) + _end_s(costs)


def _meeting_s(costs: StepCosts, ranks: Sequence[tuple[float, float]]) -> float:
    """When all buckets are through and all have computed.

    Args:
        costs: of the step.
        ranks: (when its last backward begins, how much longer than usual it takes).
    """
    loop = EventLoop()
    channel = Channel(loop)
    missing = [len(ranks)] * len(costs.sendings)

    def arrive(place: int, sending: Sending) -> None:
        missing[place] -= 1
        if not missing[place]:
            channel.send(sending.cost_s, _nothing)

    for begin, ratio in ranks:
        end = begin + ratio * costs.backward_s
        loop.after(end, _nothing)
        for place, sending in enumerate(costs.sendings):
            full = begin + ratio * sending.ready_s if costs.hides else end
            loop.after(full, partial(arrive, place, sending))
    return loop.run()


def _end_s(costs: StepCosts) -> float:
    """What follows, on all ranks alike."""
    return costs.copy_s + costs.agree_s + costs.update_s + costs.after_s


def _pipeline_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """The slowest replica, then what of its first stage's buckets is still on its way."""
    pool = [replica_s(costs, stragglers) for _ in range(min(costs.replicas, _POOL))]
    slowest = max(pool)
    begin = slowest - costs.backward_s
    return (
        costs.last_leaf_wait_s
        - costs.leaf_wait_s
        + _meeting_s(costs, [(begin, 1.0)])
        + _end_s(costs)
    )


def _round_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Ranks that step alone, up to the end of their meeting."""
    leaves = costs.every * costs.leaves
    alone = stragglers.slowest_total(costs.replicas, leaves) * costs.leaf_s
    waits = leaves * costs.leaf_wait_s
    meeting = sum(sending.cost_s for sending in costs.sendings) + costs.agree_s
    return alone + waits + costs.every * (costs.update_s + costs.copy_s) + meeting


def _nothing() -> None:
    """Only time has passed."""
