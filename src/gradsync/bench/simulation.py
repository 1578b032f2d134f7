"""`gradsync bench simulation`: are simulated steps as long as real ones? No torch here.

    1 rank       none   invariant   bucketed     what a strategy's own work costs a rank alone
    2 ranks      none   invariant   bucketed     none: 2 ranks that compute, and share the host
    4 ranks      none   invariant   bucketed

All are alive at once and take turns; lines through the collectives' times are measured before.
A prediction, see docs/guide/verifying.md, is made of these and never sees the step it predicts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench import collectives
from gradsync.bench.collectives import COPY, CollectivesSettings, Samples, fit_of, fits_of, rows_of
from gradsync.bench.contestants import ALONE, Contestant, parse_contestants
from gradsync.bench.experiment import Ask, Experiment, Findings, check_alone, taken
from gradsync.bench.report import Spread, print_table, spread, where
from gradsync.bench.scaling import parse_world_sizes
from gradsync.bench.sync_plan import (
    BenchPlan,
    Ranks,
    Results,
    SyncSettings,
    bench_plan,
    ranks_text,
    room_for,
    step_seconds,
)
from gradsync.errors import ConfigError
from gradsync.parallel.layout import ParallelLayout
from gradsync.plan.collectives import INNER_STEPS, OWN_ALGORITHMS, Fit, traffic_of
from gradsync.plan.description import Device, Hardware, Host, Link
from gradsync.plan.profile import FORWARD_PART, StepProfile, bucket_timeline
from gradsync.plan.simulation import Stragglers, step_s
from gradsync.plan.step_costs import StepCosts, step_costs
from gradsync.plan.workload import Split
from gradsync.runtime.machine import choose_threads
from gradsync.sync.registry import STRATEGIES

if TYPE_CHECKING:
    from gradsync.world import World

LIMIT = 0.15  # how far a prediction may be off
_STEPS = 200
_SEED = 0
_NOWHERE = Link(name="measured lines", alpha_s=0.0, bytes_per_s=1e12, source="never asked")
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
_ALGORITHMS = ("backend", "shared", "shared_copies")
_SMALLEST = 2**14
"""Bytes; below, a process group's time is another line's (gloo), which no bucket is on."""
_FACTOR = 8
_LIBRARIES = ("accelerate", "fabric")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """Predict training steps on 2, 4 ... ranks of this host, measure them, show both.

    A prediction is made of ranks that compute and send nothing, and of the collectives' measured
    costs; it never sees the step that it predicts. On CPUs.
    """

    world_sizes: str = "2,4"  # Numbers of ranks with commas between them.
    strategies: str = "invariant,bucketed,torch_ddp"
    """Strategy to predict, with options if need be: bucketed:bucket_mb=1."""
    model_size: str = "tiny"  # tiny, mini, small, medium, large, xl, 1.3b, 2.7b.
    batch_size: int = 1  # Sequences per rank and step.
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    leaves_per_rank: int = 1  # Micro-batches into which a rank's sequences are divided.
    num_steps: int = 5  # Optimizer steps of a turn that count.
    num_warmup: int = 1  # Optimizer steps of a turn before those.
    rounds: int = 7  # Turns of each.
    seconds_per_point: float = 0.2  # Time for one collective at one size, about, seconds.
    dtype: str = "bf16"  # fp32, or bf16 (autocast over fp32 weights).
    threads: int | None = None
    """Intra-op threads of a rank, the same for all; default: cores / the most ranks."""
    seed: int = 0  # Names tokens and weights.
    out: str = ""  # Write record.json, with every sample, into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False  # Only say what would be measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """Entries to measure, and which of them are predicted from which."""

    plan: BenchPlan
    strategies: tuple[Contestant, ...]  # as they were named

    def ranks(self, results: Results, name: str, world_size: int) -> Ranks:
        """Measurements of all ranks for a strategy, or for `none`."""
        return self.plan.ranks(results, self.plan.entry(_label(name, world_size)))


def plan_of(options: SimulationOptions, world: World) -> SimulationPlan:
    """Check the request."""
    check_alone(world, "bench simulation")
    sizes = parse_world_sizes(options.world_sizes)
    threads = choose_threads(sizes[-1], requested=options.threads)
    settings = taken(SyncSettings, options, threads=threads, device="cpu")
    chosen = tuple(
        replace(each, keep_memory=True) for each in parse_contestants(options.strategies)
    )
    if not chosen:
        raise ConfigError("--strategies: name at least one to predict")
    for each in chosen:
        if each.name in _LIBRARIES:
            raise ConfigError(f"--strategies: nobody predicts {each.name}; leave it out")
        if each.options and not each.is_ours:
            raise ConfigError(f"--strategies: {each.label}: predicted without options only")
    entries = [
        (replace(each, label=_label(each.label, size)), size, options.batch_size)
        for size in sizes
        for each in (Contestant(label=ALONE, name=ALONE), *chosen)
        if size > 1 or each.name == ALONE or _works_alone(each)
    ]
    simulation = SimulationPlan(plan=bench_plan(settings, entries), strategies=chosen)
    collectives_settings(simulation, options.seconds_per_point)  # refuses what cannot be
    tokens = options.batch_size // options.leaves_per_rank * settings.tokens
    room = room_for("cpu", tokens, ranks=sum(sizes), busy=sizes[-1])
    room.choose(options.model_size)  # refuses what fits for no contestant alone
    return replace(simulation, plan=simulation.plan.fitting(room, contestants=len(chosen) + 2))


def collectives_settings(
    simulation: SimulationPlan, seconds_per_point: float
) -> CollectivesSettings:
    """The collectives to measure: from small buckets to all gradients at once, for about
    `seconds_per_point` for one algorithm at one size."""
    settings = simulation.plan.settings
    gradients = settings.config.num_params() * 4
    own = {traffic_of(each.name, each.options).algorithm for each in simulation.strategies}
    sizes, size = {gradients}, _SMALLEST
    while size < gradients:
        sizes.add(size)
        size *= _FACTOR
    return CollectivesSettings(
        operations=_OPERATIONS,
        algorithms=(*_ALGORITHMS, *(name for name in OWN_ALGORITHMS if name in own)),
        sizes=tuple(sorted(sizes)),
        max_bytes=gradients,
        dtype="fp32",
        device="cpu",
        threads=settings.threads,
        rounds=5,
        burst=1,
        seconds_per_point=seconds_per_point,
    )


def _works_alone(strategy: Contestant) -> bool:
    """Whether it is one of the engine's: its hooks and buffers are there without peers too."""
    return strategy.is_ours and STRATEGIES[strategy.name].recipe is not None


def _label(name: str, world_size: int) -> str:
    return f"{name}, {ranks_text(world_size)}"


def _collect(
    options: SimulationOptions, simulation: SimulationPlan, world: World, ask: Ask
) -> tuple[dict[int, list[Fit]], Results]:
    """Lines through the collectives' costs by number of ranks, and what steps took."""
    settings = collectives_settings(simulation, options.seconds_per_point)
    sizes = simulation.plan.world_sizes[1:]
    fits = {size: fits_from(ask(settings, size, of=collectives.EXPERIMENT)) for size in sizes}
    return fits, simulation.plan.measured(ask)


def fits_from(result: Mapping[str, Any]) -> list[Fit]:
    """Lines through what `collectives` measured, that of the plain copy with them."""
    samples = [Samples(**entry) for entry in result["samples"]]
    rows = rows_of(samples, result["environment"]["world_size"], one_memory=False)
    copies = {row.size_bytes: row.p50_s for row in rows if row.algorithm == COPY}
    return [*fits_of(rows), fit_of(COPY, COPY, copies)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One strategy on one number of ranks."""

    strategy: str
    world_size: int
    predicted_ms: Spread  # over rounds
    measured_ms: Spread  # over rounds, of each the slowest rank's mean step
    error: Spread  # predicted over measured of the same round, less 1
    compute_ms: float  # a part of the prediction, as are the next two: forward and backward
    update_ms: float
    communication_ms: float  # collectives, copies, and waiting for the slowest rank
    error_from_one: float
    """As `error`, where only one rank alone is known, and ranks beyond the cores share them."""

    @property
    def within(self) -> bool:
        """Whether it is as good as it has to be."""
        return abs(self.error.median) <= LIMIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Times of `none` on some number of ranks in one round, seconds; means over ranks and steps."""

    leaf_s: float  # forward and backward of one leaf
    update_s: float  # clipping and optimizer


def predictions_of(
    simulation: SimulationPlan, results: Results, fits: Mapping[int, Sequence[Fit]], *, cores: int
) -> list[Prediction]:
    """One per strategy and number of ranks above 1; `fits` are by number of ranks, which share
    `cores`."""
    alone, alone_jitter = rounds_of(simulation, results, 1, cores=cores)
    found = []
    for size in simulation.plan.world_sizes[1:]:
        busy, jitter = rounds_of(simulation, results, size, cores=cores)
        crowded, even = max(1.0, size / cores), alone_jitter if size <= cores else (1.0,)
        for strategy in simulation.strategies:
            costs = _costs_of(simulation, strategy, size, fits[size])
            handling = _handling(simulation, results, strategy)
            predicted, from_one = [], []
            for here, one in zip(busy, alone, strict=True):
                slower = here.leaf_s / one.leaf_s
                step, first = (costs(*each) for each in ((here, size), (one, cores)))
                predicted.append(_simulated(step, jitter, handling, slower))
                from_one.append(_simulated(first, even, handling, crowded))
            measured = step_seconds(simulation.ranks(results, strategy.label, size))
            leaves = simulation.plan.settings.leaves_per_rank
            compute = leaves * median(each.leaf_s for each in busy)
            update_s = median(each.update_s for each in busy)
            update = costs(Round(leaf_s=1.0, update_s=update_s), size).update_s
            found.append(
                Prediction(
                    strategy=strategy.label,
                    world_size=size,
                    predicted_ms=spread([1000 * seconds for seconds in predicted]),
                    measured_ms=spread([1000 * seconds for seconds in measured]),
                    error=_error(predicted, measured),
                    compute_ms=1000 * compute,
                    update_ms=1000 * update,
                    communication_ms=1000 * (median(predicted) - compute - update),
                    error_from_one=_error(from_one, measured).median,
                )
            )
    return found


def rounds_of(
    simulation: SimulationPlan, results: Results, world_size: int, *, cores: int
) -> tuple[list[Round], tuple[float, ...]]:
    """Times of `none`, and the jitter of its rounds: none where ranks wait for a core anyway."""
    ranks = simulation.ranks(results, ALONE, world_size)
    rounds, jitter = [], []
    for number in range(simulation.plan.settings.rounds):
        computes = [seconds for rank in ranks for seconds in rank["compute_s"][number]]
        step, compute = _mean_step(ranks, number), fmean(computes)
        leaf = compute / simulation.plan.settings.leaves_per_rank
        rounds.append(Round(leaf_s=leaf, update_s=step - compute))
        jitter += [seconds / compute for seconds in computes]
    return rounds, tuple(jitter) if world_size <= cores else (1.0,)


def _mean_step(ranks: Ranks, number: int) -> float:
    return fmean(seconds for rank in ranks for seconds in rank["step_s"][number])


def _handling(simulation: SimulationPlan, results: Results, strategy: Contestant) -> float | None:
    """Time of a strategy's own work on a rank alone, seconds; None: it was not measured. One for
    all rounds, since the difference of two steps is noisier than either."""
    if not _works_alone(strategy):
        return None
    own, none = (simulation.ranks(results, name, 1) for name in (strategy.label, ALONE))
    rounds = range(simulation.plan.settings.rounds)
    return max(0.0, median(_mean_step(own, n) - _mean_step(none, n) for n in rounds))


def _costs_of(
    simulation: SimulationPlan, strategy: Contestant, size: int, fits: Sequence[Fit]
) -> Callable[[Round, int], StepCosts]:
    """Cost of one strategy's step on this host, by times of `none` and cores. The host is ranks
    and cores; of memory and peaks a prediction asks nothing."""
    settings, options = simulation.plan.settings, dict(strategy.options)
    if strategy.name in INNER_STEPS:  # one meeting in each turn, as they are measured
        options.setdefault("inner_steps", settings.num_steps)
    work = settings.workload(simulation.plan.entries[0].batch_size, "cpu", ranks=size)
    split = Split(strategy=strategy.name, layout=ParallelLayout(dp=size))
    traffic = traffic_of(strategy.name, options)
    device = Device(kind="cpu", name="a rank", memory_bytes=1, peak_flops=1.0)

    def costs(known: Round, cores: int) -> StepCosts:
        backward_s = known.leaf_s * (1 - FORWARD_PART)
        profile = StepProfile(
            forward_s=known.leaf_s * FORWARD_PART,
            backward_s=backward_s,
            update_s=known.update_s,
            buckets=bucket_timeline(work, traffic, backward_s),
            measured=True,
        )
        host = Host(devices=(device,) * size, link=_NOWHERE, cores=cores, memory_bytes=1)
        hardware = Hardware(hosts=(host,))
        return step_costs(work, split, hardware, profile, options=options, fits=fits)

    return costs


def _simulated(
    costs: StepCosts, jitter: Sequence[float], handling: float | None, slower: float
) -> float:
    """Mean of simulated steps, seconds; `handling` takes `slower` times as long as on a rank
    alone."""
    if handling is not None:
        costs = replace(costs, copy_s=handling * slower)
    stragglers = Stragglers(jitter, random.Random(_SEED))
    return fmean(step_s(costs, stragglers) for _ in range(_STEPS))


def _error(predicted: Sequence[float], measured: Sequence[float]) -> Spread:
    return spread([p / m - 1 for p, m in zip(predicted, measured, strict=True)])


_LEGEND = (
    "predicted: from ranks that talk to nobody, as many and in the same round, and from lines "
    "through the collectives' times; never from the step itself. measured: the slowest rank's mean "
    "step. error: predicted over measured of the same round, less 1. from one rank: the same when "
    "only one rank alone is known. Medians (quartiles) over rounds."
)


_VERDICT = f"within {LIMIT:.0%}?"
_COLUMNS = (
    "strategy",
    "ranks",
    "predicted, ms",
    "measured, ms",
    "error",
    "from one rank",
    _VERDICT,
)


def _cells(found: Prediction) -> tuple[str, ...]:
    error = found.error
    return (
        *(found.strategy, str(found.world_size)),
        *(found.predicted_ms.text(1), found.measured_ms.text(1)),
        f"{error.median:+.1%} ({error.low:+.1%} to {error.high:+.1%})",
        f"{found.error_from_one:+.1%}",
        "yes" if found.within else "no",
    )


def _findings(
    options: SimulationOptions, simulation: SimulationPlan, collected: Any, world: World
) -> Findings:
    fits, results = collected
    environment = results[-1]["environment"]  # of the most ranks
    found = predictions_of(simulation, results, fits, cores=environment["cores"])
    title = f"Steps predicted and measured: {simulation.plan.settings.text}"
    cells, notes = [_cells(each) for each in found], (_LEGEND, where(environment))
    return Findings(
        environment=environment,
        data={
            "plan": asdict(simulation.plan),
            "predictions": [{**asdict(each), "within_limit": each.within} for each in found],
            "fits": {str(size): [fit.to_json() for fit in lines] for size, lines in fits.items()},
        },
        samples=[result["contestants"] for result in results],
        show=lambda file: print_table(file, title, _COLUMNS, cells, notes, words=(_VERDICT,)),
    )


EXPERIMENT = Experiment(
    command=("bench", "simulation"),
    options=SimulationOptions,
    measure="gradsync.bench.steps:measure",
    variants=plan_of,
    collect=_collect,
    metrics=_findings,
    dry=lambda simulation: asdict(simulation.plan),
)
