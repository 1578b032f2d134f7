"""`gradsync bench scaling`: the same training on 1 .. N ranks, in two modes. No torch.

    weak     a rank's batch stays, the global batch grows with the ranks: a step takes as long
    strong   the global batch stays, a rank's shrinks: a step takes 1/W of the time

The baseline is one rank without any wrapper. All world sizes stay alive and take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gradsync.commands.arguments import check_least, numbers_in
from gradsync.commands.bench.experiment import (
    Experiment,
    Findings,
    Spread,
    interval,
    print_table,
    spread,
    taken,
    where,
)
from gradsync.commands.bench.sync_plan import (
    ALONE,
    BenchPlan,
    Contestant,
    DeviceName,
    Dtype,
    Results,
    SyncSettings,
    parse_contestants,
    side_by_side,
    step_seconds,
)
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import MOST_RANKS
from gradsync.runtime.machine import choose_threads, usable_cores

if TYPE_CHECKING:
    from gradsync.world import World

THRESHOLD = 0.85  # efficiency to reach
FEWEST_ROUNDS = 6
"""All n lie on one side of the median once in 2**(n-1) times: fewer give no 95 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """Train the same GPT on 1, 2, 4 … ranks of this host and report how well it scales.

    Weak: each rank keeps its batch. Strong: the global batch stays. The baseline is one rank
    without any wrapper; every round measures all world sizes.
    """

    world_sizes: str = ""
    """Numbers of ranks, separated by commas; 1 is always measured. Default: 1, 2, 4 … cores."""
    mode: Literal["weak", "strong", "both"] = "both"
    strategy: str = "invariant"
    """How gradients are synchronised, optionally with options: bucketed:bucket_mb=1."""
    model_size: str = "tiny"  # tiny, mini, small, medium, large, xl, 1.3b, 2.7b.
    batch_size: int = 1
    """Sequences per rank and step at the largest world size; weak: at every one."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    num_steps: int = 10  # Measured optimizer steps per turn.
    num_warmup: int = 2  # Optimizer steps before those, not measured.
    rounds: int = 10  # Turns of each world size; the interval comes from these.
    dtype: Dtype = "bf16"  # bf16 is autocast over fp32 weights.
    device: DeviceName = "auto"  # auto: GPUs, if there are any.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the record on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPlan(BenchPlan):
    """What to measure, and how it is compared."""

    points: tuple[tuple[str, Contestant], ...]  # By mode and ascending world size


def plan_of(options: ScalingOptions, world: World) -> ScalingPlan:
    """Check the request."""
    if world.is_distributed:
        raise ConfigError(
            f"bench scaling starts ranks itself: run it without {world.launcher}; bench sync "
            "measures the ranks that a launcher started"
        )
    check_least(options, batch_size=1, rounds=FEWEST_ROUNDS)
    chosen = parse_contestants(options.strategy)
    if len(chosen) != 1:
        raise ConfigError(f"--strategy takes one name; got {options.strategy!r}")
    sizes = parse_world_sizes(options.world_sizes, usable_cores())
    points = []
    for mode in ("weak", "strong") if options.mode == "both" else (options.mode,):
        for size in sizes:
            batch, rest = options.batch_size, 0
            if mode == "strong":
                batch, rest = divmod(options.batch_size * sizes[-1], size)
            if rest:
                raise ConfigError(
                    f"--mode strong: a global batch of {options.batch_size} x {sizes[-1]} "
                    f"sequences does not divide among {size} ranks"
                )
            contestant = chosen[0] if size > 1 else Contestant(label=ALONE, name=ALONE)
            label = f"{counted(size, 'rank')}, {batch} a rank"
            contestant = replace(contestant, label=label, world_size=size, batch_size=batch)
            points.append((mode, contestant))
    settings = taken(SyncSettings, options, threads=choose_threads(sizes[-1]))
    settings = side_by_side(settings, ranks=sum(sizes), models=len(points) // len(sizes) + 1)
    contestants = tuple({each.label: each for _, each in points}.values())
    return ScalingPlan(settings=settings, contestants=contestants, points=tuple(points))


def parse_world_sizes(text: str, cores: int) -> tuple[int, ...]:
    """`"4,2"` as (1, 2, 4); "" is 1, 2, 4 … up to the number of cores, and at least 2."""
    powers = [2**n for n in range(1, max(cores.bit_length(), 2))]
    sizes = {1, *(numbers_in("--world-sizes", text, MOST_RANKS) or powers)}
    if len(sizes) == 1:
        raise ConfigError("--world-sizes: name a number above 1 to compare one rank with")
    return tuple(sorted(sizes))


def points_of(plan: ScalingPlan, results: Results) -> list[dict[str, Any]]:
    """The figures of every point."""
    found, baseline = [], []
    for mode, contestant in plan.points:
        size = contestant.world_size
        steps = step_seconds(plan.ranks(results, contestant))
        if size == 1:  # the first of its mode
            baseline = steps
        # Weak: W times the work in the same time. Strong: the same work in 1/W of the time.
        ranks = 1 if mode == "weak" else size
        rounds = [one / (ranks * many) for one, many in zip(baseline, steps, strict=True)]
        low, high = interval(rounds)
        tokens = size * contestant.batch_size * plan.settings.tokens
        step_ms = spread([1000 * seconds for seconds in steps])
        figures = {
            "mode": mode,
            "world_size": size,
            "batch_size": contestant.batch_size,  # sequences of a rank and step
            "step_ms": asdict(step_ms),  # on the slowest rank, over rounds
            "tokens_per_s": tokens / step_ms.median * 1000,  # of all ranks
            "speedup": size * median(rounds),  # in tokens per second, over one rank
            "efficiency": median(rounds),  # speed-up per rank: 1 is perfect
            "low": low,  # 95 % confidence interval of the efficiency
            "high": high,
            "verdict": judge(low, high),  # whether the efficiency reaches the threshold
        }
        found.append(figures)
    return found


def judge(low: float, high: float) -> str:
    """Where the threshold lies relative to the interval."""
    return "yes" if low >= THRESHOLD else "no" if high < THRESHOLD else "cannot tell"


_VERDICT = f"at least {THRESHOLD:.0%}?"
_LEGEND = (
    "weak: a rank's batch stays; strong: the global batch stays. efficiency: speed-up per rank "
    "over one rank without any wrapper, of the same round (median; 95 % interval by the bootstrap "
    "over rounds)."
)
_ONE_HOST = (
    "All ranks on one host, on its CPU: they share caches and memory bandwidth. This is not how "
    "several hosts or GPUs scale, and with more ranks than cores it says nothing."
)


def _cells(point: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table, by column."""
    alone = point["world_size"] == 1
    efficiency = f"{point['efficiency']:.1%} ({point['low']:.1%}-{point['high']:.1%})"
    return {
        "mode": point["mode"],
        "ranks": str(point["world_size"]),
        "batch a rank": str(point["batch_size"]),
        "step, ms": Spread(**point["step_ms"]).text(1),
        "tokens/s": f"{point['tokens_per_s']:,.0f}",
        "speed-up": f"{point['speedup']:.2f}",
        "efficiency": "1" if alone else efficiency,
        _VERDICT: "" if alone else point["verdict"],
    }


def findings_of(plan: ScalingPlan, result: Mapping[str, Any]) -> Findings:
    """The table, and what goes into the record."""
    results, settings = result["results"], plan.settings
    environment = results[-1]["environment"]  # of the largest world size
    points = points_of(plan, results)
    notes = (_ONE_HOST, _LEGEND) if results[-1]["device"] == "cpu" else (_LEGEND,)
    name = plan.points[-1][1].name
    title = (
        f"Scaling of {name}: {settings.model_text}, sequences of {settings.tokens}; "
        f"{settings.turns_text}"
    )
    return Findings(
        environment=environment,
        data={
            "threshold": THRESHOLD,
            "plan": asdict(plan),
            "points": points,
            "samples": [result["contestants"] for result in results],
        },
        show=partial(
            print_table,
            title=title,
            rows=[_cells(point) for point in points],
            notes=(*notes, where(environment)),
            words=(_VERDICT,),
        ),
    )


EXPERIMENT = Experiment(
    command=("bench", "scaling"), options=ScalingOptions, plan=plan_of, findings=findings_of
)
