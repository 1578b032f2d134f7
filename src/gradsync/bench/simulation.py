"""Plan and predictions of `bench simulation`: steps to predict, beside ranks that never talk.

    1 rank       none   invariant   bucketed     what a strategy's own work costs a rank alone
    2 ranks      none   invariant   bucketed     none: 2 ranks that compute, and share the host
    4 ranks      none   invariant   bucketed

All are alive at once and take turns, so that what disturbs a round disturbs all in it. The lines
through the collectives' times are measured before, on as many ranks. No torch here.

A prediction knows: what ranks do that talk to nobody (`none`, as many ranks, the same round), the
lines through the collectives' times, and the model's shape. It never sees the step it predicts.

    leaf      none's forward and backward: mean over ranks and steps of the round
    update    none's clipping and optimizer
    handling  the strategy on one rank, less none there: hooks, and copies into buckets
    jitter    each of none's steps over that mean: a step's ranks draw one each, the slowest counts

[Note: More ranks than cores] Whoever waits leaves its core to those that are behind, so that no
rank's delay adds to the step: there all ranks are as slow as their mean.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import IO, Any

from gradsync.bench.collectives_plan import COPY, Settings, check_settings
from gradsync.bench.collectives_report import Samples, fit_of, fits_of, rows_of
from gradsync.bench.contestant import ALONE, Contestant, parse_contestants
from gradsync.bench.report import print_table, spread_text, where
from gradsync.bench.scaling import parse_world_sizes
from gradsync.bench.statistics import Spread, spread
from gradsync.bench.sync_plan import Entry, Plan, SyncSettings, ranks_text, sizes_plan
from gradsync.bench.sync_result import step_seconds
from gradsync.errors import ConfigError
from gradsync.parallel.layout import Layout
from gradsync.plan.collectives import INNER_STEPS, OWN_ALGORITHMS, Fit, traffic_of
from gradsync.plan.description import Device, Hardware, Host, Link
from gradsync.plan.profile import FORWARD_PART, StepProfile, bucket_timeline
from gradsync.plan.simulation import Stragglers, step_s
from gradsync.plan.step import StepCosts, step_costs
from gradsync.plan.workload import Split, Workload
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
    strategies: tuple[Contestant, ...]
    """As they were named."""

    def none(self, world_size: int) -> Entry:
        """Ranks that do not communicate."""
        return self.plan.entry(_label(ALONE, world_size))

    def alone(self, strategy: Contestant) -> Entry | None:
        """The strategy on one rank; None where that is not the same code."""
        return self.measured(strategy, 1) if _works_alone(strategy) else None

    def measured(self, strategy: Contestant, world_size: int) -> Entry:
        """The entry that is to be predicted."""
        return self.plan.entry(_label(strategy.label, world_size))


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
        ConfigError: not a number, none above 1, an unknown strategy, one that cannot be predicted.
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
        plan=sizes_plan(settings, sizes, entries),
        strategies=tuple(chosen),
    )


def collectives_settings(simulation: SimulationPlan, seconds_per_point: float) -> Settings:
    """The collectives to measure: from small buckets to all gradients at once.

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
    """Whether it is one of the engine's: its hooks and buffers are there without peers too."""
    return strategy.is_ours and STRATEGIES[strategy.name].recipe is not None


def _label(name: str, world_size: int) -> str:
    return f"{name}, {ranks_text(world_size)}"


LIMIT = 0.15
"""How far a prediction may be off."""
_STEPS = 200
_SEED = 0
_NOWHERE = Link(name="measured lines", alpha_s=0.0, bytes_per_s=1e12, source="never asked")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One strategy on one number of ranks."""

    strategy: str
    world_size: int
    predicted_ms: Spread
    """Over rounds."""
    measured_ms: Spread
    """Over rounds, of each the slowest rank's mean step."""
    error: Spread
    """Predicted over measured of the same round, less 1."""
    compute_ms: float
    """A part of the prediction, as are the next two: forward and backward."""
    update_ms: float
    communication_ms: float
    """Collectives, copies, and waiting for the slowest rank."""
    error_from_one: float
    """As `error`, where only one rank alone is known, and ranks beyond the cores share them."""

    @property
    def within(self) -> bool:
        """Whether it is as good as it has to be."""
        return abs(self.error.median) <= LIMIT

    def as_json(self) -> dict[str, Any]:
        """All fields, and the verdict."""
        return {**asdict(self), "within_limit": self.within}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Times of `none` on some number of ranks in one round; means over ranks and steps."""

    leaf_s: float
    """Forward and backward of one leaf."""
    update_s: float
    """Clipping and optimizer."""


def fits_from(result: Mapping[str, Any]) -> list[Fit]:
    """Lines through what `measure_collectives` returned, that of the plain copy with them."""
    samples = [Samples(**entry) for entry in result["samples"]]
    rows = rows_of(samples, result["environment"]["world_size"], one_memory=False)
    copies = {row.size_bytes: row.p50_s for row in rows if row.algorithm == COPY}
    return [*fits_of(rows), fit_of(COPY, COPY, copies)]


def predictions_of(
    simulation: SimulationPlan,
    results: Sequence[Mapping[str, Any]],
    fits: Mapping[int, Sequence[Fit]],
    *,
    cores: int,
) -> list[Prediction]:
    """One per strategy and number of ranks above 1.

    Args:
        simulation: what was measured.
        results: of each number of ranks, what `Runner.run` returned.
        fits: by number of ranks.
        cores: that all ranks share.
    """
    alone, alone_jitter = rounds_of(simulation, results, 1, cores=cores)
    found = []
    for size in simulation.plan.world_sizes[1:]:
        busy, jitter = rounds_of(simulation, results, size, cores=cores)
        crowded = max(1.0, size / cores)
        for strategy in simulation.strategies:
            predict = _Predictor(simulation, strategy, size, fits[size])
            handling = _handling(simulation, results, strategy)
            predicted, from_one = [], []
            for here, one in zip(busy, alone, strict=True):
                slower = here.leaf_s / one.leaf_s
                predicted.append(predict.seconds(here, jitter, handling, slower, cores=size))
                even = alone_jitter if size <= cores else (1.0,)
                from_one.append(predict.seconds(one, even, handling, crowded, cores=cores))
            measured = step_seconds(results, simulation.measured(strategy, size))
            compute = predict.leaves * median(each.leaf_s for each in busy)
            update = predict.update_s(median(each.update_s for each in busy))
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
    simulation: SimulationPlan,
    results: Sequence[Mapping[str, Any]],
    world_size: int,
    *,
    cores: int,
) -> tuple[list[Round], tuple[float, ...]]:
    """Times of `none`, and the jitter of all its rounds; see the module's note on cores."""
    entry = simulation.none(world_size)
    ranks = results[entry.worker_set]["contestants"][entry.label]
    rounds, jitter = [], []
    for number in range(simulation.plan.settings.rounds):
        computes = [seconds for rank in ranks for seconds in rank["compute_s"][number]]
        step, compute = _mean_step(ranks, number), fmean(computes)
        leaf = compute / simulation.plan.settings.leaves_per_rank
        rounds.append(Round(leaf_s=leaf, update_s=step - compute))
        jitter += [seconds / compute for seconds in computes]
    return rounds, tuple(jitter) if world_size <= cores else (1.0,)


def _mean_step(ranks: Sequence[Mapping[str, Any]], number: int) -> float:
    return fmean(seconds for rank in ranks for seconds in rank["step_s"][number])


def _handling(
    simulation: SimulationPlan, results: Sequence[Mapping[str, Any]], strategy: Contestant
) -> float | None:
    """Time of a strategy's own work on a rank alone, seconds; None: it was not measured. One for
    all rounds, since the difference of two steps is noisier than either."""
    entry, none = simulation.alone(strategy), simulation.none(1)
    if entry is None:
        return None
    ranks = results[entry.worker_set]["contestants"]
    beyond = [
        _mean_step(ranks[entry.label], number) - _mean_step(ranks[none.label], number)
        for number in range(simulation.plan.settings.rounds)
    ]
    return max(0.0, median(beyond))


class _Predictor:
    """One strategy on one number of ranks."""

    def __init__(
        self, simulation: SimulationPlan, strategy: Contestant, size: int, fits: Sequence[Fit]
    ) -> None:
        settings = simulation.plan.settings
        batch = simulation.none(size).batch_size
        self._strategy, self._size, self._fits = strategy, size, fits
        self.leaves = settings.leaves_per_rank
        self._options = dict(strategy.options)
        if strategy.name in INNER_STEPS:  # one meeting in each turn, as they are measured
            self._options.setdefault("inner_steps", settings.num_steps)
        self._split = Split(strategy=strategy.name, layout=Layout(dp=size))
        self._work = Workload(
            model=settings.config,
            micro_batch_size=batch // settings.leaves_per_rank,
            seq_len=settings.tokens,
            num_leaves=settings.leaves_per_rank * size,
            dtype="fp32" if settings.dtype == "fp32" else "bf16",
            kind="cpu",
        )

    def seconds(
        self,
        known: Round,
        jitter: Sequence[float],
        handling: float | None,
        slower: float,
        *,
        cores: int,
    ) -> float:
        """Mean of simulated steps; `handling` takes `slower` times as long as on a rank alone."""
        costs = self._costs(known.leaf_s, known.update_s, cores)
        if handling is not None:
            costs = replace(costs, copy_s=handling * slower)
        stragglers = Stragglers(jitter, random.Random(_SEED))
        return fmean(step_s(costs, stragglers) for _ in range(_STEPS))

    def update_s(self, update_s: float) -> float:
        """A rank's part of it."""
        return self._costs(1.0, update_s, self._size).update_s

    def _costs(self, leaf_s: float, update_s: float, cores: int) -> StepCosts:
        backward_s = leaf_s * (1 - FORWARD_PART)
        traffic = traffic_of(self._strategy.name, self._options)
        profile = StepProfile(
            forward_s=leaf_s * FORWARD_PART,
            backward_s=backward_s,
            update_s=update_s,
            buckets=bucket_timeline(self._work, traffic, backward_s),
            measured=True,
        )
        return step_costs(
            *(self._work, self._split, _host(self._size, cores), profile),
            options=self._options,
            fits=self._fits,
        )


def _host(ranks: int, cores: int) -> Hardware:
    """This host, as far as a prediction asks: ranks and cores; memory and peaks it does not."""
    device = Device(kind="cpu", name="a rank", memory_bytes=1, peak_flops=1.0)
    host = Host(devices=(device,) * ranks, link=_NOWHERE, cores=cores, memory_bytes=1)
    return Hardware(hosts=(host,))


def _error(predicted: Sequence[float], measured: Sequence[float]) -> Spread:
    return spread([p / m - 1 for p, m in zip(predicted, measured, strict=True)])


_LEGEND = (
    "predicted: from ranks that talk to nobody, as many and in the same round, and from lines "
    "through the collectives' times; never from the step itself. measured: the slowest rank's mean "
    "step. error: predicted over measured of the same round, less 1. from one rank: the same when "
    "only one rank alone is known. Medians (quartiles) over rounds."
)


def settings_text(settings: SyncSettings) -> str:
    """The measurement, in one line."""
    return f"{settings.model_text}, sequences of {settings.tokens}; {settings.turns_text}"


def print_report(
    simulation: SimulationPlan,
    found: Sequence[Prediction],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Table, legend, where it was measured."""
    title = f"Steps predicted and measured: {settings_text(simulation.plan.settings)}"
    verdict = f"within {LIMIT:.0%}?"
    columns = ("strategy", "ranks", "predicted, ms", "measured, ms", "error", "from one rank")
    cells = [
        (
            each.strategy,
            str(each.world_size),
            spread_text(each.predicted_ms, 1),
            spread_text(each.measured_ms, 1),
            f"{each.error.median:+.1%} ({each.error.low:+.1%} to {each.error.high:+.1%})",
            f"{each.error_from_one:+.1%}",
            "yes" if each.within else "no",
        )
        for each in found
    ]
    notes = (_LEGEND, where(environment))
    print_table(stream, title, (*columns, verdict), cells, notes, words=(verdict,))
