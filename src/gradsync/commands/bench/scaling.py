"""`gradsync bench scaling`: the same training on 1 .. N ranks, in two modes. No torch.

    weak     a rank's batch stays, the global batch grows with the ranks: a step takes as long
    strong   the global batch stays, a rank's shrinks: a step takes 1/W of the time

The baseline is one rank without any wrapper. All world sizes stay alive and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gradsync.commands.bench.contestants import ALONE, Contestant, parse_contestants
from gradsync.commands.bench.experiment import Experiment, Findings, check_alone, check_least, taken
from gradsync.commands.bench.report import Spread, interval, print_table, spread, where
from gradsync.commands.bench.sync_plan import (
    USUAL_TOKENS,
    BenchPlan,
    Entry,
    Results,
    SyncSettings,
    bench_plan,
    ranks_text,
    room_for,
    step_seconds,
)
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import MOST_RANKS, whole_number
from gradsync.runtime.machine import choose_threads, usable_cores

if TYPE_CHECKING:
    from gradsync.world import World

Verdict = Literal["yes", "no", "cannot tell"]
MODES = ("weak", "strong")
THRESHOLD = 0.85  # efficiency to reach
FEWEST_ROUNDS = 6
"""The bootstrap's interval lies within its values. All n lie on one side of the median once in
2**(n-1) times, so fewer rounds give no interval of 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """Train the same GPT on 1, 2, 4 … ranks of this host and report how well it scales.

    Weak: each rank keeps its batch. Strong: the global batch stays. The baseline is one rank
    without any wrapper; every round measures all world sizes.
    """

    world_sizes: str = ""
    """Numbers of ranks, separated by commas; 1 is always measured. Default: 1, 2, 4 … up to the
    number of cores."""
    mode: str = "both"  # weak, strong or both.
    strategy: str = "invariant"
    """How gradients are synchronised, optionally with options: bucketed:bucket_mb=1."""
    model_size: str = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b; auto takes the largest that fits."""
    batch_size: int = 1
    """Sequences per rank and step at the largest world size; weak: at every one."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    num_steps: int = 10  # Measured optimizer steps per turn.
    num_warmup: int = 2  # Optimizer steps before those, not measured.
    rounds: int = 10  # Turns of each world size; the interval comes from these.
    dtype: str = "bf16"  # fp32, or bf16 (autocast over fp32 weights).
    device: str = "auto"  # auto, cpu or cuda.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False  # Only say what would be measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPlan:
    """Entries to measure, and how they are compared."""

    plan: BenchPlan
    modes: tuple[str, ...]
    batch_size: int
    """Sequences of a rank and step in weak mode; in strong mode, those of a rank at the largest
    world size."""

    def entry(self, mode: str, world_size: int) -> Entry:
        """The entry that measures this point; both modes may share one."""
        batch = _batch_of(mode, world_size, self.plan.world_sizes, self.batch_size)
        return self.plan.entry(_label(world_size, batch))

    @property
    def title(self) -> str:
        """The measurement, in one line."""
        strategy = self.entry(self.modes[0], self.plan.world_sizes[-1]).contestant.name
        return f"Scaling of {strategy}: {self.plan.settings.text}"


def plan_of(options: ScalingOptions, world: World) -> ScalingPlan:
    """Check the request."""
    check_alone(world, "bench scaling")
    check_least(options, batch_size=1, context_length=1, rounds=FEWEST_ROUNDS)
    sizes = parse_world_sizes(options.world_sizes or usual_sizes(usable_cores()))
    tokens = options.batch_size * (options.context_length or USUAL_TOKENS)
    room = room_for(options.device, tokens, ranks=sum(sizes), busy=sizes[-1])
    settings = taken(
        SyncSettings,
        options,
        model_size=room.choose(options.model_size),
        threads=choose_threads(sizes[-1]),
    )
    mode, batch_size = options.mode, options.batch_size
    if mode != "both" and mode not in MODES:
        raise ConfigError(f"--mode must be {', '.join(MODES)} or both; got {mode!r}")
    modes = MODES if mode == "both" else (mode,)
    chosen = parse_contestants(options.strategy)
    if any(each.chose_memory for each in chosen):
        raise ConfigError(
            f"--strategy {options.strategy}: here all keep freed memory; drop keep_memory"
        )
    if len(chosen) != 1:
        raise ConfigError(f"--strategy takes one name; got {options.strategy!r}")
    entries: dict[str, tuple[Contestant, int, int]] = {}
    for each in modes:
        for size in sizes:
            batch = _batch_of(each, size, sizes, batch_size)
            label = _label(size, batch)
            many = Contestant(label=label, name=chosen[0].name, options=chosen[0].options)
            one = Contestant(label=label, name=ALONE)
            entries[label] = (many if size > 1 else one, size, batch)
    plan = bench_plan(settings, entries.values()).fitting(room, contestants=len(modes) + 1)
    return ScalingPlan(plan=plan, modes=modes, batch_size=batch_size)


def usual_sizes(cores: int) -> str:
    """1, 2, 4 … up to the number of cores, and at least 2."""
    sizes = [1, 2]
    while 2 * sizes[-1] <= cores:
        sizes.append(2 * sizes[-1])
    return ",".join(map(str, sizes))


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """`"2,4"` as (1, 2, 4): ascending, 1 first."""
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
class ScalingPoint:
    """One world size in one mode."""

    mode: str
    world_size: int
    batch_size: int  # sequences of a rank and step
    step_ms: Spread  # on the slowest rank, over rounds
    tokens_per_s: float  # tokens of all ranks
    speedup: float  # in tokens per second, over one rank
    efficiency: float  # speed-up per rank: 1 is perfect
    low: float  # 95 % confidence interval of the efficiency
    high: float
    verdict: Verdict  # whether the efficiency reaches the threshold


def points_of(scaling: ScalingPlan, results: Results) -> list[ScalingPoint]:
    """One point per mode and world size."""
    plan, found = scaling.plan, []
    for mode in scaling.modes:
        baseline = step_seconds(plan.ranks(results, scaling.entry(mode, 1)))
        for size in plan.world_sizes:
            entry = scaling.entry(mode, size)
            steps = step_seconds(plan.ranks(results, entry))
            # Weak: W times the work in the same time. Strong: the same work in 1/W of the time.
            ranks = 1 if mode == "weak" else size
            rounds = [one / (ranks * many) for one, many in zip(baseline, steps, strict=True)]
            low, high = interval(rounds)
            tokens = size * entry.batch_size * plan.settings.tokens
            step_ms = spread([1000 * seconds for seconds in steps])
            found.append(
                ScalingPoint(
                    mode=mode,
                    world_size=size,
                    batch_size=entry.batch_size,
                    step_ms=step_ms,
                    tokens_per_s=tokens / step_ms.median * 1000,
                    speedup=size * median(rounds),
                    efficiency=median(rounds),
                    low=low,
                    high=high,
                    verdict=judge(low, high),
                )
            )
    return found


def judge(low: float, high: float) -> Verdict:
    """Where the threshold lies relative to the interval."""
    return "yes" if low >= THRESHOLD else "no" if high < THRESHOLD else "cannot tell"


_LEGEND = (
    "weak: a rank's batch stays; strong: the global batch stays. efficiency: speed-up per rank "
    "over one rank without any wrapper, of the same round (median; 95 % interval by the bootstrap "
    "over rounds)."
)


_COLUMNS = ("mode", "ranks", "batch a rank", "step, ms", "tokens/s", "speed-up", "efficiency")


def _cells(point: ScalingPoint) -> tuple[str, ...]:
    efficiency = f"{point.efficiency:.1%} ({point.low:.1%}-{point.high:.1%})"
    return (
        *(point.mode, str(point.world_size), str(point.batch_size), point.step_ms.text(1)),
        *(f"{point.tokens_per_s:,.0f}", f"{point.speedup:.2f}"),
        *(("1", "") if point.world_size == 1 else (efficiency, point.verdict)),
    )


def notes_of(scaling: ScalingPlan, *, on_cpu: bool, cores: int) -> list[str]:
    """Facts that a reader needs to judge the figures."""
    notes, ranks = [], scaling.plan.world_sizes[-1]
    threads = scaling.plan.settings.threads
    if on_cpu:
        notes.append(
            "All ranks on one host, on its CPU: they share caches and memory bandwidth. This is "
            "not how several hosts or GPUs scale."
        )
    if on_cpu and ranks * threads > cores:
        notes.append(
            f"WARNING: {ranks} ranks x {counted(threads, 'thread')} want more than the {cores} "
            "cores that there are: efficiency beyond that many ranks says nothing."
        )
    return notes


def _findings(
    options: ScalingOptions, scaling: ScalingPlan, results: Results, world: World
) -> Findings:
    environment = results[-1]["environment"]  # of the largest world size
    on_cpu, points = results[-1]["device"] == "cpu", points_of(scaling, results)
    notes, place = notes_of(scaling, on_cpu=on_cpu, cores=environment["cores"]), where(environment)
    verdict, cells = f"at least {THRESHOLD:.0%}?", [_cells(point) for point in points]
    said, columns = (*notes, _LEGEND, place), (*_COLUMNS, verdict)
    return Findings(
        environment=environment,
        data={
            "threshold": THRESHOLD,
            "same_host_cpu": on_cpu,
            "notes": notes,
            "plan": asdict(scaling.plan),
            "points": [asdict(point) for point in points],
        },
        samples=[result["contestants"] for result in results],
        show=lambda file: print_table(file, scaling.title, columns, cells, said, words=(verdict,)),
    )


EXPERIMENT = Experiment(
    command=("bench", "scaling"),
    options=ScalingOptions,
    measure="gradsync.commands.bench.steps:measure",
    variants=plan_of,
    collect=lambda _, scaling, __, ask: scaling.plan.measured(ask),
    metrics=_findings,
    dry=lambda scaling: asdict(scaling.plan),
)
