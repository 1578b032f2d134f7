"""From samples to predicted beside measured; no torch here.

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
from typing import Any

from gradsync.bench.collectives_figures import Samples, fits_of, rows_of
from gradsync.bench.collectives_plan import COPY
from gradsync.bench.contestant import Contestant
from gradsync.bench.simulation_plan import SimulationPlan
from gradsync.bench.statistics import Spread, spread
from gradsync.bench.sync_result import turns
from gradsync.hardware.description import Device, Hardware, Host, Link
from gradsync.hardware.simulate.step import step_s
from gradsync.hardware.simulate.stragglers import Stragglers
from gradsync.hardware.timing.alpha_beta import Fit, fit_line, quality
from gradsync.hardware.timing.bucket_timeline import bucket_timeline
from gradsync.hardware.timing.estimate import FORWARD_PART
from gradsync.hardware.timing.step_costs import StepCosts, step_costs
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.timing.traffic import INNER_STEPS, traffic_of
from gradsync.hardware.workload import Split, Workload
from gradsync.parallel.layout import Layout

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
    """Of the prediction, as are the next two: forward and backward."""
    update_ms: float
    communication_ms: float
    """Collectives, copies, and waiting for the slowest rank."""
    error_from_one: float = 0.0
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
    """What `none` did on some number of ranks in one round; means over ranks and steps."""

    leaf_s: float
    """Forward and backward of one leaf."""
    update_s: float
    """Clipping and optimizer."""


def fits_from(result: Mapping[str, Any]) -> list[Fit]:
    """Lines through what `measure_collectives` returned, that of the plain copy with them."""
    samples = [Samples(**entry) for entry in result["samples"]]
    rows = rows_of(samples, result["environment"]["world_size"], one_memory=False)
    copies = {row.size_bytes: row.p50_s for row in rows if row.algorithm == COPY}
    alpha, beta = fit_line(list(copies), list(copies.values()))
    residual, worst = quality(alpha, beta, list(copies), list(copies.values()))
    copy = Fit(
        operation=COPY,
        algorithm=COPY,
        alpha_s=alpha,
        beta_s_per_byte=beta,
        residual=residual,
        worst=worst,
        num_sizes=len(copies),
    )
    return [*fits_of(rows), copy]


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
    for size in simulation.world_sizes[1:]:
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
            entry = simulation.measured(strategy, size)
            ranks = results[entry.worker_set]["contestants"][entry.label]
            measured = turns([rank["step_s"] for rank in ranks])
            error_from_one = _error(from_one, measured).median
            prediction = _prediction(predict, busy, predicted, measured)
            found.append(replace(prediction, error_from_one=error_from_one))
    return found


def rounds_of(
    simulation: SimulationPlan,
    results: Sequence[Mapping[str, Any]],
    world_size: int,
    *,
    cores: int,
) -> tuple[list[Round], tuple[float, ...]]:
    """What `none` did, and the jitter of all its rounds; see the module's note on cores."""
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
    """What a strategy's own work takes of a rank alone, seconds; None: nobody measured it. One for
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


def _prediction(
    predict: _Predictor,
    busy: Sequence[Round],
    predicted: Sequence[float],
    measured: Sequence[float],
) -> Prediction:
    compute = predict.leaves * median(each.leaf_s for each in busy)
    update = predict.update_s(median(each.update_s for each in busy))
    return Prediction(
        strategy=predict.strategy.label,
        world_size=predict.size,
        predicted_ms=spread([1000 * seconds for seconds in predicted]),
        measured_ms=spread([1000 * seconds for seconds in measured]),
        error=_error(predicted, measured),
        compute_ms=1000 * compute,
        update_ms=1000 * update,
        communication_ms=1000 * (median(predicted) - compute - update),
    )


class _Predictor:
    """One strategy on one number of ranks."""

    def __init__(
        self, simulation: SimulationPlan, strategy: Contestant, size: int, fits: Sequence[Fit]
    ) -> None:
        settings = simulation.plan.settings
        batch = simulation.none(size).batch_size
        self.strategy, self.size, self._fits = strategy, size, fits
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
        return self._costs(1.0, update_s, self.size).update_s

    def _costs(self, leaf_s: float, update_s: float, cores: int) -> StepCosts:
        backward_s = leaf_s * (1 - FORWARD_PART)
        traffic = traffic_of(self.strategy.name, self._options)
        profile = StepProfile(
            forward_s=leaf_s * FORWARD_PART,
            backward_s=backward_s,
            update_s=update_s,
            buckets=bucket_timeline(self._work, traffic, backward_s),
            measured=True,
        )
        return step_costs(
            *(self._work, self._split, _host(self.size, cores), profile),
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
