"""Plan and figures of `bench scaling`: the same training on 1 .. N ranks, in two modes. No torch.

    weak     a rank's batch stays, the global batch grows with the ranks: a step should take as long
    strong   the global batch stays, a rank's shrinks: a step should take a W-th of the time

The baseline is one rank with no wrapper at all. All world sizes are alive at once and take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import IO, Any, Literal

from gradsync.bench.contestant import ALONE, Contestant, parse_contestants
from gradsync.bench.report import print_table, spread_text, where
from gradsync.bench.statistics import Spread, interval, spread
from gradsync.bench.sync_plan import Entry, Plan, SyncSettings, ranks_text, sizes_plan
from gradsync.bench.sync_result import step_seconds
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import MOST_RANKS, whole_number

Verdict = Literal["yes", "no", "cannot tell"]
MODES = ("weak", "strong")
FEWEST_ROUNDS = 6
"""The bootstrap's interval lies within its values: all of n lie on one side of the median once in
2**(n-1) times, so from fewer no interval holds for 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPlan:
    """Entries to measure, and how they are compared."""

    plan: Plan
    modes: tuple[str, ...]
    batch_size: int
    """Sequences of a rank and step in weak mode; in strong mode those of a rank when there are as
    many ranks as ever."""

    def batch_of(self, mode: str, world_size: int) -> int:
        """Sequences of a rank and step."""
        return _batch_of(mode, world_size, self.plan.world_sizes, self.batch_size)

    def entry(self, mode: str, world_size: int) -> Entry:
        """The entry that measures it; both modes may share one."""
        return self.plan.entry(_label(world_size, self.batch_of(mode, world_size)))


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
    plan = sizes_plan(settings, sizes, entries.values())
    return ScalingPlan(plan=plan, modes=modes, batch_size=batch_size)


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
    return f"{ranks_text(world_size)}, {batch_size} a rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One world size in one mode."""

    mode: str
    world_size: int
    batch_size: int
    """Sequences of a rank and step."""
    step_ms: Spread
    """On the slowest rank, over rounds."""
    tokens_per_s: float
    """Tokens of all ranks."""
    speedup: float
    """In tokens per second, over one rank."""
    efficiency: float
    """Speed-up per rank: 1 is perfect."""
    low: float
    """95 % confidence interval of the efficiency."""
    high: float
    verdict: Verdict
    """Whether the efficiency reaches the threshold; "cannot tell" if that is in the interval."""


def points_of(
    scaling: ScalingPlan, results: Sequence[Mapping[str, Any]], threshold: float
) -> list[Point]:
    """One point per mode and world size.

    Args:
        scaling: what was measured.
        results: of each world size, what `Runner.run` returned.
        threshold: efficiency to reach.
    """
    found = []
    for mode in scaling.modes:
        baseline = step_seconds(results, scaling.entry(mode, 1))
        for size in scaling.plan.world_sizes:
            steps = step_seconds(results, scaling.entry(mode, size))
            # Weak: W times the work in the same time. Strong: the same work in a W-th of the time.
            ranks = 1 if mode == "weak" else size
            rounds = [one / (ranks * many) for one, many in zip(baseline, steps, strict=True)]
            low, high = interval(rounds)
            tokens = size * scaling.batch_of(mode, size) * scaling.plan.settings.tokens
            step_ms = spread([1000 * seconds for seconds in steps])
            found.append(
                Point(
                    mode=mode,
                    world_size=size,
                    batch_size=scaling.batch_of(mode, size),
                    step_ms=step_ms,
                    tokens_per_s=tokens / step_ms.median * 1000,
                    speedup=size * median(rounds),
                    efficiency=median(rounds),
                    low=low,
                    high=high,
                    verdict=judge(low, high, threshold),
                )
            )
    return found


def judge(low: float, high: float, threshold: float) -> Verdict:
    """Where the threshold lies beside the interval."""
    if low >= threshold:
        return "yes"
    return "no" if high < threshold else "cannot tell"


_LEGEND = (
    "weak: a rank's batch stays; strong: the global batch stays. efficiency: speed-up per rank "
    "over one rank without any wrapper, of the same round (median; 95 % interval by the bootstrap "
    "over rounds)."
)


def print_report(
    scaling: ScalingPlan,
    points: Sequence[Point],
    *,
    threshold: float,
    notes: Sequence[str],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Table, notes, legend, where it was measured."""
    verdict = f"at least {threshold:.0%}?"
    columns = ("mode", "ranks", "batch a rank", "step, ms", "tokens/s", "speed-up", "efficiency")
    cells = [
        (
            point.mode,
            str(point.world_size),
            str(point.batch_size),
            spread_text(point.step_ms, 1),
            f"{point.tokens_per_s:,.0f}",
            f"{point.speedup:.2f}",
            "1"
            if point.world_size == 1
            else f"{point.efficiency:.1%} ({point.low:.1%}-{point.high:.1%})",
            "" if point.world_size == 1 else point.verdict,
        )
        for point in points
    ]
    about = (*notes, _LEGEND, where(environment))
    print_table(stream, title(scaling), (*columns, verdict), cells, about, words=(verdict,))


def title(scaling: ScalingPlan) -> str:
    """The measurement, in one line."""
    settings = scaling.plan.settings
    strategy = scaling.entry(scaling.modes[0], scaling.plan.world_sizes[-1]).contestant.name
    return (
        f"Scaling of {strategy}: {settings.model_text}, sequences of {settings.tokens}; "
        f"{settings.turns_text}"
    )


def notes_of(scaling: ScalingPlan, *, on_cpu: bool, cores: int) -> list[str]:
    """Facts that a reader has to know to judge the figures."""
    notes, ranks = [], scaling.plan.world_sizes[-1]
    threads = scaling.plan.settings.threads
    if on_cpu:
        notes.append(
            "All ranks on one host, on its CPU: they share caches and memory bandwidth. This is "
            "not how several hosts or GPUs scale."
        )
    if on_cpu and ranks * threads > cores:
        notes.append(
            f"WARNING: {ranks} ranks x {threads} thread(s) want more than the {cores} cores that "
            "there are: efficiency beyond that many ranks says nothing."
        )
    return notes
