"""The training step on machines beyond the one here: points, and where they cross; pure.

[Note: Weak scaling] Every replica keeps its leaves, so that the global batch grows with the ranks,
and efficiency is tokens per second and rank over those of one rank alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from gradsync.errors import ConfigError
from gradsync.plan.description import Hardware, Host, Link
from gradsync.plan.simulate.failures import (
    Failures,
    daly_interval_s,
    goodput,
    simulated_goodput,
)
from gradsync.plan.simulate.play import Stragglers, step_s
from gradsync.plan.timing.profile import StepProfile
from gradsync.plan.timing.step import StepTime, predict_step, step_costs, tokens_per_s_alone
from gradsync.plan.workload import Split, Workload
from gradsync.sync.registry import find_strategy

Efficiency = Callable[[str, int], float]
"""A strategy's, on so many ranks."""

HALF = 0.5
_CLEAR = 1.02
"""An advantage of less than 2 % is none."""
_WORTH = 0.1
"""Below that efficiency it does not matter which of two is ahead."""
DEFAULT_STRATEGIES = (
    *("bucketed", "ring", "hierarchical", "invariant", "fsdp"),
    *("powersgd", "local_sgd", "diloco"),
)
_STEPS = 20
_FEWEST_STEPS = 3
_DRAWS = 2**17
"""Ranks times steps, about: the more ranks, the less their slowest one varies from step to step."""
_LARGEST = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One split on one number of ranks."""

    name: str
    """The split, without its number of replicas."""
    world_size: int
    step_s: float
    """Mean over the simulated steps, seconds."""
    even_step_s: float
    """By closed form, with all ranks equally fast."""
    tokens_per_s: float
    """All ranks together."""
    efficiency: float
    """Tokens per second and rank, over those of one rank alone; see [Note: Weak scaling]."""
    goodput: float
    """Useful part of the time with failures, by closed form."""
    simulated_goodput: float
    """The same, played."""
    checkpoint_interval_s: float
    """Work between two saves (Daly 2006)."""

    @property
    def overall(self) -> float:
        """Efficiency with failures."""
        return self.efficiency * self.goodput


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All points, and the sentences about them."""

    points: tuple[Point, ...]
    """By split, then by world size."""
    crossovers: tuple[str, ...]
    """Sentences."""
    world_sizes: tuple[int, ...]
    host: Host
    network: Link | None
    failures: Failures
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by strategy, where some were given."""

    @property
    def names(self) -> list[str]:
        """Splits in order."""
        return list(dict.fromkeys(point.name for point in self.points))

    def point(self, name: str, world_size: int) -> Point | None:
        """One of them; None where the split does not divide so many ranks."""
        return next((p for p in self.points if (p.name, p.world_size) == (name, world_size)), None)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "world_sizes": list(self.world_sizes),
            "devices_per_host": len(self.host.devices),
            "device": self.host.devices[0].name,
            "link": asdict(self.host.link),
            "network": None if self.network is None else asdict(self.network),
            "failures": asdict(self.failures),
            "options": {name: dict(given) for name, given in self.options.items()},
            "points": [{**asdict(p), "overall": p.overall} for p in self.points],
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
    options: Mapping[str, Mapping[str, Any]] | None = None,
    failures: Failures | None = None,
    steps: int = _STEPS,
    seed: int = 0,
) -> Simulation:
    """Play steps of each split on each number of ranks; see the package for an example.

    Args:
        work: one replica's leaves of a step, as `num_leaves`; each replica has so many.
        host: what there are more of. Ranks fill hosts in order.
        network: between hosts; None where all sizes fit into one.
        world_sizes: numbers of ranks.
        profile: of the whole model on one of the host's devices; its jitter makes stragglers.
        splits: strategy, pp and tp; dp is what is left of the ranks. Default: data parallelism by
            each of `DEFAULT_STRATEGIES`.
        options: of strategies, by name.
        failures: None: the defaults.
        steps: to play, of each; fewer where ranks are many thousands.
        seed: of stragglers and failures; the same gives the same.

    Raises:
        ConfigError: no world size, one below 1 or above 65,536, several hosts without a
            network, an unknown strategy or option, a split that divides none of the sizes.
    """
    sizes = tuple(sorted(set(world_sizes)))
    _check(sizes, host, network)
    chosen = list(splits) or [Split(strategy=name) for name in DEFAULT_STRATEGIES]
    for split in chosen:
        if all(size % split.layout.model_ranks for size in sizes):
            raise ConfigError(
                f"{name_of(split)}: needs a multiple of {split.layout.model_ranks} ranks; got "
                f"{', '.join(map(str, sizes))}"
            )
    scene = _Scene(work, host, network, profile, options or {})
    failures, played = failures or Failures(), cache(simulated_goodput)
    points = []
    for split in chosen:
        for size in (size for size in sizes if size % split.layout.model_ranks == 0):
            mean_s, even_s = scene.step_s(split, size, steps, seed), scene.even(split, size).total_s
            tokens_per_s = work.step_tokens * (size // split.layout.model_ranks) / mean_s
            interval = daly_interval_s(failures.checkpoint_s, failures.mtbf_s(size))
            point = Point(
                name=name_of(split),
                world_size=size,
                step_s=mean_s,
                even_step_s=even_s,
                tokens_per_s=tokens_per_s,
                efficiency=tokens_per_s / size / scene.alone(),
                goodput=goodput(interval, failures, size),
                simulated_goodput=played(interval, failures, size, seed=seed),
                checkpoint_interval_s=interval,
            )
            points.append(point)
    return Simulation(
        points=tuple(points),
        crossovers=tuple(_crossovers_of(scene, chosen, sizes)),
        world_sizes=sizes,
        host=host,
        network=network,
        failures=failures,
        options=dict(options or {}),
    )


def name_of(split: Split) -> str:
    """Such as `bucketed`, or `bucketed pp=2`: without replicas."""
    return str(replace(split, layout=replace(split.layout, dp=1)))


@dataclass(frozen=True, slots=True)
class _Scene:
    """The parts that all points share."""

    work: Workload
    host: Host
    network: Link | None
    profile: StepProfile
    options: Mapping[str, Mapping[str, Any]]

    def alone(self) -> float:
        """Tokens per second of one rank by itself."""
        return tokens_per_s_alone(self.work, self.profile, self.work.num_leaves)

    def step_s(self, split: Split, size: int, steps: int, seed: int) -> float:
        """Mean of so many played steps, fewer on very many ranks."""
        case, given = self._case(split, size)
        costs = step_costs(*case, options=given)
        # The split's own text: the seed of a simulation is part of what it says.
        rng = random.Random(f"{seed} {case[1]} {size}")
        stragglers = Stragglers(self.profile.jitter, rng, together=split.layout.tp)
        steps = min(steps, max(_FEWEST_STEPS, _DRAWS // size))
        return fmean(step_s(costs, stragglers) for _ in range(steps))

    def even(self, split: Split, size: int) -> StepTime:
        """The step by closed form."""
        case, given = self._case(split, size)
        return predict_step(*case, options=given)

    def _case(
        self, split: Split, size: int
    ) -> tuple[tuple[Workload, Split, Hardware, StepProfile], Mapping[str, Any]]:
        replicas = size // split.layout.model_ranks
        hosts = -(-size // len(self.host.devices))
        case = (
            replace(self.work, num_leaves=self.work.num_leaves * replicas),
            replace(split, layout=replace(split.layout, dp=replicas)),
            Hardware(hosts=(self.host,) * hosts, network=self.network),
            self.profile,
        )
        return case, self.options.get(split.strategy, {})


def _crossovers_of(scene: _Scene, splits: Sequence[Split], sizes: Sequence[int]) -> list[str]:
    """By closed form, on all powers of two between the sizes."""
    between = {2**k for k in range(21) if sizes[0] < 2**k < sizes[-1]}
    grid = sorted(
        n for n in {*sizes, *between} if all(n % split.layout.model_ranks == 0 for split in splits)
    )
    if len(grid) < 2:
        return []
    by_name = {name_of(split): split for split in splits}
    efficiency = cache(lambda name, size: scene.even(by_name[name], size).efficiency)
    lossy = [name for name, s in by_name.items() if find_strategy(s.strategy).promise == "lossy"]
    over = scene.host.link.name if scene.network is None else scene.network.name
    return crossovers(list(by_name), lossy, grid, efficiency, over=over)


def crossovers(
    names: Sequence[str],
    losing: Sequence[str],
    sizes: Sequence[int],
    efficiency: Efficiency,
    *,
    over: str,
) -> list[str]:
    """From which number of ranks on something changes, in words.

    Args:
        names: strategies, as they are called.
        losing: those that do not keep one rank's numbers.
        sizes: numbers of ranks to look at, ascending, several; finer than the table's.
        efficiency: asked for every name and size.
        over: the network, in a word.
    """
    exact = [name for name in names if name not in losing]
    lines = []
    for number, first in enumerate(exact):
        for second in exact[number + 1 :]:
            lines += _lead(first, second, sizes, efficiency)
    falling: dict[int, list[str]] = {}
    alive = []
    for name in names:
        above = [efficiency(name, n) >= HALF for n in sizes]
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


def _lead(first: str, second: str, sizes: Sequence[int], efficiency: Efficiency) -> Iterator[str]:
    """A line where two change places and stay so."""
    ahead: list[tuple[int, str]] = []
    for n in sizes:
        one, other = efficiency(first, n), efficiency(second, n)
        if one > _CLEAR * other or other > _CLEAR * one:
            ahead.append((n, first if one > other else second))
    if not ahead or ahead[0][1] == ahead[-1][1]:
        return
    winner = ahead[-1][1]
    loser = second if winner == first else first
    start = next(
        ahead[place][0]
        for place in range(len(ahead))
        if all(name == winner for _, name in ahead[place:])
    )
    if efficiency(winner, start) >= _WORTH:
        yield f"from {start} ranks on, {winner} beats {loser}"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _check(sizes: Sequence[int], host: Host, network: Link | None) -> None:
    if not sizes:
        raise ConfigError("simulate: name numbers of ranks, such as 8,64,512")
    for size in sizes:
        if not 1 <= size <= _LARGEST:
            raise ConfigError(f"simulate: {size} ranks; expected 1 to {_LARGEST}")
    if sizes[-1] > len(host.devices) and network is None:
        raise ConfigError(
            f"simulate: {sizes[-1]} ranks are more than a host's {len(host.devices)} devices: name "
            "the network between hosts, such as infiniband-ndr"
        )


_HOUR = 3600.0


def report_text(found: Simulation) -> str:
    """Efficiency of every split on every number of ranks, then the rest; several lines."""
    sizes = [str(size) for size in found.world_sizes]
    rows = [["efficiency", *(f"{size} ranks" for size in sizes)]]
    for name in found.names:
        points = [found.point(name, size) for size in found.world_sizes]
        rows.append([name, *("" if p is None else f"{p.efficiency:.1%}" for p in points)])
    first = [found.point(found.names[0], size) for size in found.world_sizes]
    rows.append(["useful with failures", *("" if p is None else f"{p.goodput:.1%}" for p in first)])
    rows.append(
        ["saving every", *("" if p is None else _span(p.checkpoint_interval_s) for p in first)]
    )
    return "\n".join(
        [*_table(rows), "", *(f"- {line}" for line in found.crossovers), *notes(found)]
    )


def notes(found: Simulation) -> list[str]:
    """The assumptions behind the figures, a line each."""
    host, failures = found.host, found.failures
    lines = [
        f"{len(host.devices)} x {host.devices[0].name} a host, {_link(host.link)}",
        "efficiency: tokens per second and rank over one rank alone; each replica keeps its leaves",
        f"failures: a device every {failures.device_mtbf_s / _HOUR:,.0f} h, "
        f"{failures.checkpoint_s:g} s to save, {failures.restart_s:g} s to begin again; saving as "
        "often as Daly 2006 says",
    ]
    if found.network is not None:
        lines.insert(1, f"between hosts {_link(found.network)}")
    return lines


def _link(link: Link) -> str:
    port = " a host" if link.per_host else " a rank"
    return f"{link.name}: {link.bytes_per_s / 1e9:.3g} GB/s{port}, {link.alpha_s * 1e6:.3g} us"


def _span(seconds: float) -> str:
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
