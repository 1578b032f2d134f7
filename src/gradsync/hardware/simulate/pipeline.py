"""One replica's pipeline as events: stages that wait for their neighbours' messages; pure.

gpipe    F F F F . . B B B B          all forwards first (arXiv 1811.06965)
1f1b     F F F B F B . B . B          at most as many leaves open as stages follow
                                      (arXiv 1806.03377, 2104.04473)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gradsync.hardware.simulate.events import EventLoop
from gradsync.hardware.simulate.stragglers import Stragglers
from gradsync.hardware.timing.step_costs import StepCosts

Work = tuple[Literal["forward", "backward"], int]
"""Which pass of which leaf."""


def replica_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """When the last stage of one replica has done its last backward, seconds."""
    return _Replica(costs, stragglers.one).run()


def order_of(schedule: str, stage: int, stages: int, leaves: int) -> list[Work]:
    """What a stage does after what."""
    ahead = leaves if schedule == "gpipe" else min(leaves, stages - stage)
    order: list[Work] = [("forward", leaf) for leaf in range(ahead)]
    for leaf in range(leaves):
        order.append(("backward", leaf))
        if ahead + leaf < leaves:
            order.append(("forward", ahead + leaf))
    return order


class _Replica:
    def __init__(self, costs: StepCosts, ratio: Callable[[], float]) -> None:
        self._costs, self._ratio = costs, ratio
        self._loop = EventLoop()
        stages, leaves = range(costs.stages), costs.leaves
        self._orders = [order_of(costs.schedule, s, costs.stages, leaves) for s in stages]
        self._next = [0] * costs.stages
        self._busy = [False] * costs.stages
        # The first stage has its inputs; the last one may turn around on its own.
        self._arrived: list[set[Work]] = [set() for _ in stages]
        self._arrived[0].update(("forward", leaf) for leaf in range(leaves))

    def run(self) -> float:
        """Play it."""
        self._begin(0)
        return self._loop.run()

    def _begin(self, stage: int) -> None:
        """The stage's next piece of work, if it is free and has what it needs."""
        place = self._next[stage]
        if self._busy[stage] or place == len(self._orders[stage]):
            return
        work = self._orders[stage][place]
        if work not in self._arrived[stage]:
            return
        self._busy[stage] = True
        costs = self._costs
        usual = costs.forward_s if work[0] == "forward" else costs.backward_s
        wait = costs.leaf_wait_s if work[0] == "forward" else 0.0
        self._loop.after(usual * self._ratio() + wait, lambda: self._end(stage, work))

    def _end(self, stage: int, work: Work) -> None:
        self._busy[stage] = False
        self._next[stage] += 1
        kind, leaf = work
        last = self._costs.stages - 1
        if kind == "forward" and stage == last:
            self._arrived[stage].add(("backward", leaf))
        elif kind == "forward":
            self._send(stage + 1, ("forward", leaf))
        elif stage > 0:
            self._send(stage - 1, ("backward", leaf))
        self._begin(stage)

    def _send(self, stage: int, work: Work) -> None:
        def arrive() -> None:
            self._arrived[stage].add(work)
            self._begin(stage)

        self._loop.after(self._costs.hop_s, arrive)
