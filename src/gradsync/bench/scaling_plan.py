"""What `bench scaling` measures: the same training on 1 .. N ranks, in two modes. No torch here.

    weak     a rank's batch stays, the global batch grows with the ranks: a step should take as long
    strong   the global batch stays, a rank's shrinks: a step should take a W-th of the time

The baseline is one rank with no wrapper at all. All world sizes are alive at once and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.bench.contestant import ALONE, Contestant, parse_contestants
from gradsync.bench.sync_plan import Entry, Plan, SyncSettings, WorkerSet
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import MOST_RANKS, whole_number

MODES = ("weak", "strong")
FEWEST_ROUNDS = 6
"""The bootstrap's interval lies within its values: all of n lie on one side of the median once in
2**(n-1) times, so from fewer no interval holds for 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPlan:
    """Entries to measure, and how they are compared."""

    plan: Plan
    world_sizes: tuple[int, ...]
    """Ascending, 1 first."""
    modes: tuple[str, ...]
    batch_size: int
    """Sequences of a rank and step in weak mode; in strong mode those of a rank when there are as
    many ranks as ever."""

    def batch_of(self, mode: str, world_size: int) -> int:
        """Sequences of a rank and step."""
        return _batch_of(mode, world_size, self.world_sizes, self.batch_size)

    def entry(self, mode: str, world_size: int) -> Entry:
        """Who measures it; both modes may share one."""
        label = _label(world_size, self.batch_of(mode, world_size))
        return next(entry for entry in self.plan.entries if entry.label == label)


def scaling_plan(
    settings: SyncSettings, *, strategy: str, world_sizes: str, mode: str, batch_size: int
) -> ScalingPlan:
    """Check what was asked for.

    Args:
        settings: how each point is measured.
        strategy: for more than one rank, with options if need be.
        world_sizes: numbers with commas between them; 1 is always measured.
        mode: weak, strong or both.
        batch_size: see `ScalingPlan.batch_size`.

    Raises:
        ConfigError: not a number, a world size below 1, none above 1, an unknown mode or strategy,
            too few rounds, a global batch that does not divide.
    """
    if mode != "both" and mode not in MODES:
        raise ConfigError(f"--mode must be {', '.join(MODES)} or both; got {mode!r}")
    if settings.rounds < FEWEST_ROUNDS:
        raise ConfigError(f"--rounds must be at least {FEWEST_ROUNDS}; got {settings.rounds}")
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1; got {batch_size}")
    sizes = parse_world_sizes(world_sizes)
    modes = MODES if mode == "both" else (mode,)
    chosen = parse_contestants(strategy)
    if any(each.chose_memory for each in chosen):
        raise ConfigError(f"--strategy {strategy}: here all keep freed memory; drop keep_memory")
    if len(chosen) != 1:
        raise ConfigError(f"--strategy takes one name; got {strategy!r}")
    entries: dict[str, Entry] = {}
    for each in modes:
        for place, size in enumerate(sizes):
            batch = _batch_of(each, size, sizes, batch_size)
            label = _label(size, batch)
            entries[label] = Entry(
                contestant=Contestant(
                    label=label,
                    name=chosen[0].name if size > 1 else ALONE,
                    options=chosen[0].options if size > 1 else {},
                ),
                worker_set=place,
                batch_size=batch,
            )
    plan = Plan(
        settings=settings,
        sets=tuple(WorkerSet(world_size=size, keep_memory=True) for size in sizes),
        entries=tuple(entries.values()),
    )
    return ScalingPlan(plan=plan, world_sizes=sizes, modes=modes, batch_size=batch_size)


def usual_sizes(cores: int) -> str:
    """1, 2, 4 … as far as the cores go, and 2 at least."""
    sizes = [1, 2]
    while 2 * sizes[-1] <= cores:
        sizes.append(2 * sizes[-1])
    return ",".join(map(str, sizes))


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """`"2,4"` as (1, 2, 4): ascending, 1 first.

    Raises:
        ConfigError: not a number, one below 1, none above 1.
    """
    sizes = {1}
    for word in filter(None, (word.strip() for word in text.split(","))):
        number = whole_number(word.removeprefix("-"), MOST_RANKS)
        if number is None:
            raise ConfigError(
                f"--world-sizes: {word[:80]!r} is not a number of ranks, at most {MOST_RANKS}"
            )
        if not number or word[0] == "-":
            raise ConfigError(f"--world-sizes: must be at least 1; got {word}")
        sizes.add(number)
    if len(sizes) == 1:
        raise ConfigError("--world-sizes: name a number above 1 to compare one rank with")
    return tuple(sorted(sizes))


def _batch_of(mode: str, world_size: int, sizes: Sequence[int], batch_size: int) -> int:
    if mode == "weak":
        return batch_size
    whole = batch_size * sizes[-1]
    if whole % world_size:
        raise ConfigError(
            f"--mode strong: a global batch of {batch_size} x {sizes[-1]} sequences does not "
            f"divide among {world_size} ranks; take --batch-size {world_size * batch_size}"
        )
    return whole // world_size


def _label(world_size: int, batch_size: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''}, {batch_size} a rank"
