"""What `bench simulation` measures: steps to predict, and beside them ranks that talk to nobody.

    1 rank       none   invariant   bucketed     what a strategy's own work costs a rank alone
    2 ranks      none   invariant   bucketed     none: 2 ranks that compute, and share the host
    4 ranks      none   invariant   bucketed

All are alive at once and take turns, so that what disturbs a round disturbs all in it. The lines
through the collectives' times are measured before, on as many ranks. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.bench.collectives_plan import Settings, check_settings
from gradsync.bench.contestant import ALONE, Contestant, parse_contestants
from gradsync.bench.scaling_plan import parse_world_sizes
from gradsync.bench.sync_plan import Entry, Plan, SyncSettings, WorkerSet
from gradsync.errors import ConfigError
from gradsync.hardware.timing.prices import OWN_ALGORITHMS
from gradsync.hardware.timing.traffic import traffic_of
from gradsync.sync.registry import STRATEGIES

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
_ALGORITHMS = ("backend", "shared", "shared_copies")
_SMALLEST = 2**14
"""Bytes; below, a process group's time is another line's (gloo), which no bucket is on."""
_FACTOR = 8
_LIBRARIES = ("accelerate", "fabric")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """Entries to measure, and which of them are predicted from which."""

    plan: Plan
    world_sizes: tuple[int, ...]
    """Ascending, 1 first."""
    strategies: tuple[Contestant, ...]
    """As they were named."""

    def none(self, world_size: int) -> Entry:
        """Ranks that talk to nobody."""
        return self._entry(ALONE, world_size)

    def alone(self, strategy: Contestant) -> Entry | None:
        """The strategy on one rank; None where that is not the same code."""
        return self._entry(strategy.label, 1) if _works_alone(strategy) else None

    def measured(self, strategy: Contestant, world_size: int) -> Entry:
        """What is to be predicted."""
        return self._entry(strategy.label, world_size)

    def _entry(self, label: str, world_size: int) -> Entry:
        wanted = _label(label, world_size)
        return next(entry for entry in self.plan.entries if entry.label == wanted)


def simulation_plan(
    settings: SyncSettings, *, strategies: str, world_sizes: str, batch_size: int
) -> SimulationPlan:
    """Check what was asked for.

    Args:
        settings: how each entry is measured.
        strategies: names with commas between them, each with options if need be.
        world_sizes: numbers with commas between them; 1 is always measured.
        batch_size: sequences of a rank and step.

    Raises:
        ConfigError: not a number, none above 1, an unknown strategy, one that nobody can predict.
    """
    sizes = parse_world_sizes(world_sizes)
    chosen = [replace(each, keep_memory=True) for each in parse_contestants(strategies)]
    if not chosen:
        raise ConfigError("--strategies: name at least one to predict")
    for each in chosen:
        if each.name in _LIBRARIES:
            raise ConfigError(f"--strategies: nobody predicts {each.name}; leave it out")
        if each.options and not each.is_ours:
            raise ConfigError(f"--strategies: {each.label}: predicted without options only")
    entries = [
        Entry(
            contestant=replace(each, label=_label(each.label, size)),
            worker_set=place,
            batch_size=batch_size,
        )
        for place, size in enumerate(sizes)
        for each in (Contestant(label=ALONE, name=ALONE), *chosen)
        if size > 1 or each.name == ALONE or _works_alone(each)
    ]
    return SimulationPlan(
        plan=Plan(
            settings=settings,
            sets=tuple(WorkerSet(world_size=size, keep_memory=True) for size in sizes),
            entries=tuple(entries),
        ),
        world_sizes=sizes,
        strategies=tuple(chosen),
    )


def collectives_settings(simulation: SimulationPlan, seconds_per_point: float) -> Settings:
    """What to measure of the collectives: from small buckets to all gradients at once.

    Args:
        simulation: the steps.
        seconds_per_point: for one algorithm at one size, about.

    Raises:
        ConfigError: see `check_settings`.
    """
    settings = simulation.plan.settings
    gradients = settings.config.num_params() * 4
    own = {traffic_of(each.name, each.options).algorithm for each in simulation.strategies}
    sizes, size = {gradients}, _SMALLEST
    while size < gradients:
        sizes.add(size)
        size *= _FACTOR
    return check_settings(
        Settings(
            operations=_OPERATIONS,
            algorithms=(
                *_ALGORITHMS,
                *(OWN_ALGORITHMS[name] for name in OWN_ALGORITHMS if name in own),
            ),
            sizes=tuple(sorted(sizes)),
            max_bytes=gradients,
            dtype="fp32",
            device="cpu",
            threads=settings.threads,
            rounds=5,
            burst=1,
            seconds_per_point=seconds_per_point,
        )
    )


def _works_alone(strategy: Contestant) -> bool:
    """Of the engine: its hooks and buffers are there without peers too."""
    return strategy.is_ours and STRATEGIES[strategy.name].recipe is not None


def sizes_above_one(sizes: Sequence[int]) -> list[int]:
    """Those at which ranks talk."""
    return [size for size in sizes if size > 1]


def _label(name: str, world_size: int) -> str:
    return f"{name}, {world_size} rank{'s' if world_size > 1 else ''}"
