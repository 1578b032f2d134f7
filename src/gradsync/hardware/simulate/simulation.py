"""A step on machines that nobody here has: every strategy, every number of ranks; pure.

[Note: Weak scaling] Every replica keeps its leaves, so that the global batch grows with the ranks,
and efficiency is tokens per second and rank over those of one rank alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from gradsync.errors import ConfigError
from gradsync.hardware.description import Hardware, Host, Link
from gradsync.hardware.simulate.crossover import crossovers
from gradsync.hardware.simulate.failures import (
    Failures,
    daly_interval_s,
    goodput,
    simulated_goodput,
)
from gradsync.hardware.simulate.step import step_s
from gradsync.hardware.simulate.stragglers import Stragglers
from gradsync.hardware.timing.step_costs import step_costs
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.timing.step_time import predict_step, tokens_per_s_alone
from gradsync.hardware.workload import Split, Workload
from gradsync.sync.registry import find_strategy

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
    """Of the split, without its number of replicas."""
    world_size: int
    step_s: float
    """Mean over the simulated steps, seconds."""
    even_step_s: float
    """By closed form, with all ranks equally fast."""
    tokens_per_s: float
    """Of all ranks."""
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
    """What came out."""

    points: tuple[Point, ...]
    """By split, then by world size."""
    crossovers: tuple[str, ...]
    """Sentences."""
    world_sizes: tuple[int, ...]
    host: Host
    network: Link | None
    failures: Failures
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of strategies that were given some."""

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
    scene = _Scene(work, host, network, profile, dict(options or {}))
    chosen = list(splits) or [Split(strategy=name) for name in DEFAULT_STRATEGIES]
    failures = failures or Failures()
    points = [
        scene.point(split, size, failures, steps, seed)
        for split in chosen
        for size in sizes
        if size % split.layout.model_ranks == 0
    ]
    for split in chosen:
        if all(size % split.layout.model_ranks for size in sizes):
            raise ConfigError(
                f"{name_of(split)}: needs a multiple of {split.layout.model_ranks} ranks; got "
                f"{', '.join(map(str, sizes))}"
            )
    return Simulation(
        points=tuple(points),
        crossovers=tuple(scene.crossovers(chosen, sizes)),
        world_sizes=sizes,
        host=host,
        network=network,
        failures=failures,
        options=dict(options or {}),
    )


def name_of(split: Split) -> str:
    """Such as `bucketed`, or `bucketed pp=2`: without replicas."""
    return str(replace(split, layout=replace(split.layout, dp=1)))


class _Scene:
    """What all points share."""

    def __init__(
        self,
        work: Workload,
        host: Host,
        network: Link | None,
        profile: StepProfile,
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._work, self._host, self._network = work, host, network
        self._profile, self._options = profile, options
        self._played_goodput = cache(simulated_goodput)
        self._alone = tokens_per_s_alone(work, profile, work.num_leaves)

    def point(self, split: Split, size: int, failures: Failures, steps: int, seed: int) -> Point:
        work, split, hardware, given = self._case(split, size)
        costs = step_costs(work, split, hardware, self._profile, options=given)
        stragglers = Stragglers(
            self._profile.jitter,
            random.Random(f"{seed} {split} {size}"),
            together=split.layout.tp,
        )
        steps = min(steps, max(_FEWEST_STEPS, _DRAWS // size))
        seconds = fmean(step_s(costs, stragglers) for _ in range(steps))
        even = predict_step(work, split, hardware, self._profile, options=given)
        tokens = work.step_tokens / seconds
        mtbf = failures.mtbf_s(size)
        interval = daly_interval_s(failures.checkpoint_s, mtbf)
        return Point(
            name=name_of(split),
            world_size=size,
            step_s=seconds,
            even_step_s=even.total_s,
            tokens_per_s=tokens,
            efficiency=tokens / size / self._alone,
            goodput=goodput(interval, failures, size),
            simulated_goodput=self._played_goodput(interval, failures, size, seed=seed),
            checkpoint_interval_s=interval,
        )

    def crossovers(self, splits: Sequence[Split], sizes: Sequence[int]) -> list[str]:
        """By closed form, on all powers of two between the sizes."""
        step = max(split.layout.model_ranks for split in splits)
        between = {2**k for k in range(21) if sizes[0] < 2**k < sizes[-1]}
        grid = sorted(
            n
            for n in {*sizes, *between}
            if all(n % split.layout.model_ranks == 0 for split in splits) and n >= step
        )
        if len(grid) < 2:
            return []
        by_name = {name_of(split): split for split in splits}

        @cache
        def efficiency(name: str, size: int) -> float:
            work, split, hardware, given = self._case(by_name[name], size)
            return predict_step(work, split, hardware, self._profile, options=given).efficiency

        lossy = [
            name for name, s in by_name.items() if find_strategy(s.strategy).promise == "lossy"
        ]
        over = self._host.link.name if self._network is None else self._network.name
        return crossovers(list(by_name), lossy, grid, efficiency, over=over)

    def _case(self, split: Split, size: int) -> tuple[Workload, Split, Hardware, Mapping[str, Any]]:
        """Everything about one point."""
        replicas = size // split.layout.model_ranks
        hosts = -(-size // len(self._host.devices))
        return (
            replace(self._work, num_leaves=self._work.num_leaves * replicas),
            replace(split, layout=replace(split.layout, dp=replicas)),
            Hardware(hosts=(self._host,) * hosts, network=self._network),
            self._options.get(split.strategy, {}),
        )


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
