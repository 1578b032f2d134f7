"""The training step on larger machines (`gradsync plan --simulate`): simulated steps with ranks of
unequal speed, and where strategies cross; no torch.

    rank r     leaf ... leaf │ backward: bucket 0 full, bucket 1 full, ...
    channel                  │      [bucket 0][bucket 1]  ...          one at a time, in order
    all                      │                              agree, update, gather weights

A bucket starts when the last rank has filled it and the channel is free. A leaf takes its usual
time, multiplied by a randomly drawn measured ratio (the bootstrap). All ranks are drawn, even
thousands. Of ranks that wait for each other, only the few that may be last in something count. A
pipeline's stages wait for their neighbours' messages:

    F F F B F B . B . B          1F1B: at most as many leaves open as stages follow
                                 (arXiv 1806.03377, 2104.04473)

Every replica keeps its leaves, and the global batch grows with the ranks (weak scaling).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any, Literal

from gradsync.errors import ConfigError
from gradsync.plan.description import Hardware, Host, Link
from gradsync.plan.profile import StepProfile
from gradsync.plan.step_costs import (
    StepCosts,
    StepTime,
    channel_end,
    predict_step,
    step_costs,
    tokens_per_s_alone,
)
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import find_strategy

_EXACT_LEAVES = 16  # Longer sums are drawn from a normal distribution (central limit theorem)
_POOL = 16
"""The most pipelines to simulate; each further one is like one of these."""


class Stragglers:
    """Draws ratios of `jitter`, durations over the usual one; `together` ranks that synchronise in
    each leaf count as one, as slow as the slowest."""

    def __init__(self, jitter: Sequence[float], rng: random.Random, *, together: int = 1) -> None:
        self._jitter = sorted(jitter)
        self._rng = rng
        self._power = 1 / together
        count = len(self._jitter)
        # The probability of each ratio to be the greatest of `together` draws.
        below = [(place / count) ** together for place in range(count + 1)]
        chances = [high - low for low, high in pairwise(below)]
        self._mean, square = (
            sum(chance * ratio**k for chance, ratio in zip(chances, self._jitter, strict=True))
            for k in (1, 2)
        )
        self._deviation = math.sqrt(max(0.0, square - self._mean**2))
        self._even = self._jitter[0] == self._jitter[-1]

    def slowest(self, ranks: int = 1) -> float:
        """The greatest ratio of one leaf over `ranks` ranks, by inversion."""
        place = self._rng.random() ** (self._power / ranks) * len(self._jitter)
        return self._jitter[min(int(place), len(self._jitter) - 1)]

    def total(self, leaves: int) -> float:
        """The sum of the ratios of `leaves` leaves."""
        if self._even:
            return leaves * self._jitter[0]
        if leaves <= _EXACT_LEAVES:
            return sum(self.slowest() for _ in range(leaves))
        return self._rng.gauss(leaves * self._mean, leaves**0.5 * self._deviation)

    def latest(self, ranks: int, leaves: int) -> list[tuple[float, float]]:
        """The ranks that may be last: (ratios of all leaves but the last, ratio of the last). A
        rank that is ahead of another in both is never last."""
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
        """The greatest sum of `leaves` ratios over ranks that do not synchronise meanwhile."""
        return self.total(leaves) if self._even else max(self.total(leaves) for _ in range(ranks))


def step_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Seconds of one step; the mean if ranks do not synchronise in each."""
    end_s = costs.copy_s + costs.agree_s + costs.update_s + costs.after_s
    if costs.every > 1:
        return _round_s(costs, stragglers) / costs.every
    if costs.stages > 1:  # the slowest replica, then its buckets in flight
        slowest = max(_replica_s(costs, stragglers) for _ in range(min(costs.replicas, _POOL)))
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
    """When all buckets are through and all have computed; `ranks`: (start of its last backward, how
    much longer than usual it takes)."""

    def last(usual_s: float) -> float:
        return max(begin + ratio * usual_s for begin, ratio in ranks)

    computed = last(costs.backward_s)
    full = [
        replace(each, ready_s=last(each.ready_s) if costs.hides else computed)
        for each in costs.sendings
    ]
    return max(computed, channel_end(sorted(full, key=lambda sending: sending.ready_s)))


def _round_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """Ranks that step alone, up to the end of their synchronisation."""
    leaves = costs.every * costs.leaves
    alone = stragglers.slowest_total(costs.replicas, leaves) * costs.leaf_s
    waits = leaves * costs.leaf_wait_s
    meeting = sum(sending.cost_s for sending in costs.sendings) + costs.agree_s
    return alone + waits + costs.every * (costs.update_s + costs.copy_s) + meeting


Pass = tuple[Literal["forward", "backward"], int]  # Direction, leaf


def order_of(stage: int, stages: int, leaves: int) -> list[Pass]:
    """The order in which a pipeline stage works."""
    ahead = min(leaves, stages - stage)
    order: list[Pass] = [("forward", leaf) for leaf in range(ahead)]
    for leaf in range(leaves):
        order.append(("backward", leaf))
        if ahead + leaf < leaves:
            order.append(("forward", ahead + leaf))
    return order


def _replica_s(costs: StepCosts, stragglers: Stragglers) -> float:
    """When the last stage of one replica has done its last backward, seconds."""
    stages, last = range(costs.stages), costs.stages - 1
    orders = [order_of(stage, costs.stages, costs.leaves) for stage in stages]
    places, free = [0] * costs.stages, [0.0] * costs.stages
    # The first stage has its inputs.
    arrived: dict[tuple[int, Pass], float] = {
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


_HALF = 0.5
_CLEAR = 1.02  # A smaller advantage than 2 % does not count
_WORTH = 0.1  # Below that efficiency the order of two does not matter
DEFAULT_STRATEGIES = (
    *("bucketed", "ring", "hierarchical", "invariant", "fsdp"),
    *("powersgd", "local_sgd", "diloco"),
)
_STEPS, _FEWEST_STEPS = 20, 3
_DRAWS = 2**17
"""Approximate ranks times steps: with more ranks, the slowest one varies less between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPoint:
    """One split on one number of ranks."""

    name: str  # The split, without its number of replicas
    world_size: int
    step_s: float  # Mean over the simulated steps, seconds
    even_step_s: float  # By closed form, with all ranks equally fast
    tokens_per_s: float  # All ranks together
    efficiency: float
    """Tokens per second and rank, over those of one rank alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All points, and the sentences about them."""

    points: tuple[SplitPoint, ...]  # By split, then by world size
    crossovers: tuple[str, ...]  # Sentences
    world_sizes: tuple[int, ...]
    host: Host
    network: Link | None

    @property
    def names(self) -> list[str]:
        """Splits in order."""
        return list(dict.fromkeys(point.name for point in self.points))

    def point(self, name: str, world_size: int) -> SplitPoint | None:
        """One of them; None if the split does not divide that many ranks."""
        return next((p for p in self.points if (p.name, p.world_size) == (name, world_size)), None)

    def to_json(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "world_sizes": list(self.world_sizes),
            "devices_per_host": len(self.host.devices),
            "device": self.host.devices[0].name,
            "link": asdict(self.host.link),
            "network": None if self.network is None else asdict(self.network),
            "points": [asdict(point) for point in self.points],
            "crossovers": list(self.crossovers),
        }


def simulate(
    work: Workload,
    host: Host,
    network: Link | None,
    world_sizes: Sequence[int],
    profile: StepProfile,
    *,
    splits: Sequence[Split] = (),
    steps: int = _STEPS,
    seed: int = 0,
) -> Simulation:
    """Simulate steps of each split on each number of ranks; these fill the hosts in order.

    Args:
        work: one replica's leaves of a step, as `num_leaves`; the same for each replica.
        profile: of the whole model on one of the host's devices; its jitter makes stragglers.
        splits: strategy, pp and tp; dp is the rest of the ranks. Default: data parallelism with
            each of `DEFAULT_STRATEGIES`.
        steps: number to simulate for each; fewer for many thousands of ranks.
        seed: of stragglers; the same seed gives the same result.

    Raises:
        ConfigError: an unknown strategy, several hosts without a network, a split that divides
            none of the sizes.
    """
    sizes = tuple(sorted(set(world_sizes)))
    chosen = {
        str(replace(split, layout=replace(split.layout, dp=1))): split
        for split in splits or [Split(strategy=name) for name in DEFAULT_STRATEGIES]
    }
    for name, split in chosen.items():
        parts, got = split.layout.model_ranks, ", ".join(map(str, sizes))
        if all(size % parts for size in sizes):
            raise ConfigError(f"{name}: needs a multiple of {parts} ranks; got {got}")

    def case(split: Split, size: int) -> tuple[Workload, Split, Hardware, StepProfile]:
        replicas, hosts = size // split.layout.model_ranks, -(-size // len(host.devices))
        return (
            replace(work, num_leaves=work.num_leaves * replicas),
            replace(split, layout=replace(split.layout, dp=replicas)),
            Hardware(hosts=(host,) * hosts, network=network),
            profile,
        )

    @cache
    def even(name: str, size: int) -> StepTime:
        return predict_step(*case(chosen[name], size))

    points, alone = [], tokens_per_s_alone(work, profile, work.num_leaves)
    for name, split in chosen.items():
        parts = split.layout.model_ranks
        for size in (size for size in sizes if size % parts == 0):
            costs = step_costs(*case(split, size))
            mean_s = _played_s(costs, profile, case(split, size)[1], steps, seed)
            tokens_per_s = work.step_tokens * (size // parts) / mean_s
            point = SplitPoint(
                name=name,
                world_size=size,
                step_s=mean_s,
                even_step_s=even(name, size).total_s,
                tokens_per_s=tokens_per_s,
                efficiency=tokens_per_s / size / alone,
            )
            points.append(point)
    lossy = [name for name, s in chosen.items() if find_strategy(s.strategy).promise == "lossy"]
    grid = _between(sizes, [split.layout.model_ranks for split in chosen.values()])
    over = (network or host.link).name
    lines = crossovers(list(chosen), lossy, grid, lambda *at: even(*at).efficiency, over=over)
    return Simulation(
        points=tuple(points),
        crossovers=tuple(lines),
        world_sizes=sizes,
        host=host,
        network=network,
    )


def _played_s(costs: StepCosts, profile: StepProfile, split: Split, steps: int, seed: int) -> float:
    """Mean over `steps` simulated steps, fewer on very many ranks."""
    # The seed includes the split's text: if the text changes, so do the results.
    rng = random.Random(f"{seed} {split} {split.world_size}")
    stragglers = Stragglers(profile.jitter, rng, together=split.layout.tp)
    played = range(min(steps, max(_FEWEST_STEPS, _DRAWS // split.world_size)))
    return fmean(step_s(costs, stragglers) for _ in played)


def _between(sizes: Sequence[int], parts: Sequence[int]) -> list[int]:
    """`sizes` and the powers of two between them, if all `parts` divide them."""
    between = {2**k for k in range(21) if sizes[0] < 2**k < sizes[-1]}
    return sorted(n for n in {*sizes, *between} if not any(n % part for part in parts))


def crossovers(
    names: Sequence[str],
    losing: Sequence[str],
    sizes: Sequence[int],
    efficiency: Callable[[str, int], float],
    *,
    over: str,
) -> list[str]:
    """At which of `sizes` something changes, in words; those of `names` that are in `losing` do not
    keep one rank's numbers."""
    if len(sizes) < 2:
        return []
    exact = [name for name in names if name not in losing]
    lines = [line for pair in combinations(exact, 2) for line in _lead(*pair, sizes, efficiency)]
    falling: dict[int, list[str]] = {}
    alive = []
    for name in names:
        above = [efficiency(name, n) >= _HALF for n in sizes]
        if above[-1]:
            alive.append(name)
        elif any(above):
            start = len(above) - above[::-1].index(True)
            falling.setdefault(sizes[start], []).append(name)
    lines += [
        f"from {size} ranks on, {_list(those)} {'are' if len(those) > 1 else 'is'} below 50 %"
        for size, those in sorted(falling.items())
    ]
    stay = "nothing stays"
    if alive:
        stay = f"only {_list(alive)} {'stay' if len(alive) > 1 else 'stays'}"
    if len(alive) == len(names):
        stay = "all stay"
    return [*lines, f"on {sizes[-1]} ranks over {over}, {stay} above 50 %"]


def _lead(
    first: str, second: str, sizes: Sequence[int], efficiency: Callable[[str, int], float]
) -> Iterator[str]:
    """A line if two change places for good."""
    ahead: list[tuple[int, str]] = []
    for n in sizes:
        one, other = efficiency(first, n), efficiency(second, n)
        if one > _CLEAR * other or other > _CLEAR * one:
            ahead.append((n, first if one > other else second))
    if not ahead or ahead[0][1] == ahead[-1][1]:
        return
    winner = ahead[-1][1]
    loser = second if winner == first else first
    behind = max(place for place, (_, name) in enumerate(ahead) if name == loser)
    start = ahead[behind + 1][0]
    if efficiency(winner, start) >= _WORTH:
        yield f"from {start} ranks on, {winner} beats {loser}"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def report_text(found: Simulation) -> str:
    """Efficiency of every split on every number of ranks, then the rest; several lines."""

    def row(name: str) -> list[str]:
        points = [found.point(name, size) for size in found.world_sizes]
        return [name, *("" if point is None else f"{point.efficiency:.1%}" for point in points)]

    rows = [
        ["efficiency", *(f"{size} ranks" for size in found.world_sizes)],
        *(row(name) for name in found.names),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [title.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        ).rstrip()
        for title, *cells in rows
    ]
    return "\n".join([*table, "", *(f"- {line}" for line in found.crossovers), *_notes(found)])


def _notes(found: Simulation) -> list[str]:
    """The assumptions of the figures, a line each."""
    host = found.host
    network = [] if found.network is None else [f"between hosts {_link(found.network)}"]
    return [
        f"{len(host.devices)} x {host.devices[0].name} a host, {_link(host.link)}",
        *network,
        "efficiency: tokens per second and rank over one rank alone; each replica keeps its leaves",
    ]


def _link(link: Link) -> str:
    port = " a host" if link.per_host else " a rank"
    return f"{link.name}: {link.bytes_per_s / 1e9:.3g} GB/s{port}, {link.alpha_s * 1e6:.3g} us"
