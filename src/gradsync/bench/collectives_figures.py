"""From samples to figures: percentiles, bandwidths, part of the limit, fits. Pure; no torch.

`algbw` and `busbw` are nccl-tests' (its PERFORMANCE.md): size / time, and that times the part of
the tensor that must pass each rank's link, so that a ring at its best shows the link's speed.

    all_reduce 2 (n - 1) / n     reduce_scatter, all_gather (n - 1) / n     broadcast 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from gradsync.bench.collectives_plan import COPY
from gradsync.bench.copy_bandwidth import copied_bytes, limit_s
from gradsync.bench.statistics import Spread, percentile, ratios, spread
from gradsync.hardware.timing.alpha_beta import Fit, fit_line, quality

GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Times of one algorithm at one size."""

    operation: str
    """Of `collectives_plan.OPERATIONS`."""
    algorithm: str
    """Of that operation, or `COPY`."""
    size_bytes: int
    """See `collectives_plan`."""
    count: int
    """Elements."""
    rounds_s: list[list[float]]
    """Per round and repetition: seconds on the slowest rank."""

    @property
    def all_s(self) -> list[float]:
        """All repetitions of all rounds, seconds."""
        return list(chain.from_iterable(self.rounds_s))

    @property
    def medians_s(self) -> list[float]:
        """Of each round, seconds."""
        return [percentile(times, 50) for times in self.rounds_s]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a table says of one algorithm at one size."""

    operation: str
    """Of `collectives_plan.OPERATIONS`."""
    algorithm: str
    """Of that operation, or `COPY`."""
    size_bytes: int
    """See `collectives_plan`."""
    count: int
    """Elements."""
    repetitions: int
    """Over all rounds."""
    p50_s: float
    """Median time, seconds."""
    p95_s: float
    """95 of 100 were not slower, seconds."""
    algbw_gbs: float
    """1e9 bytes per second."""
    busbw_gbs: float | None
    """1e9 bytes per second; None for the copy."""
    limit_s: float | None
    """What the least bytes take at the rate of a plain copy, where ranks share memory, seconds;
    None elsewhere, and for the copy."""
    of_limit: Spread | None
    """The operation's rate relative to a plain copy's, by rounds; what works in place may pass 1
    (see `copy_bandwidth`, [Note: Beyond the limit])."""


def bus_factor(operation: str, world_size: int) -> float:
    """busbw / algbw; see the table above."""
    others = (world_size - 1) / world_size
    return {"all_reduce": 2 * others, "broadcast": 1.0}.get(operation, others)


def rows_of(found: Sequence[Samples], world_size: int, *, one_memory: bool) -> list[Row]:
    """A row for each entry, in their order.

    Args:
        found: with the copy's samples for each operation and size.
        world_size: number of ranks.
        one_memory: whether all ranks share a host's memory, so that the copy is a yardstick.
    """
    copies = {(s.operation, s.count): s for s in found if s.algorithm == COPY}
    return [_row(s, copies[s.operation, s.count], world_size, one_memory=one_memory) for s in found]


def _row(samples: Samples, copy: Samples, world_size: int, *, one_memory: bool) -> Row:
    times, size = samples.all_s, samples.size_bytes
    p50_s = percentile(times, 50)
    is_copy = samples.algorithm == COPY
    # What a copy moves is read once and written once; an algorithm's size counts once.
    algbw = (copied_bytes(size) if is_copy else size) / p50_s / GB
    limit, of_limit = None, None
    if one_memory and not is_copy:
        limits = [limit_s(samples.operation, size, world_size, s) for s in copy.medians_s]
        limit = percentile(limits, 50)
        of_limit = spread(ratios(limits, samples.medians_s))
    return Row(
        operation=samples.operation,
        algorithm=samples.algorithm,
        size_bytes=size,
        count=samples.count,
        repetitions=len(times),
        p50_s=p50_s,
        p95_s=percentile(times, 95),
        algbw_gbs=algbw,
        busbw_gbs=None if is_copy else algbw * bus_factor(samples.operation, world_size),
        limit_s=limit,
        of_limit=of_limit,
    )


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """A line for each operation and algorithm that was measured at two sizes or more."""
    fits = []
    for operation, algorithm in dict.fromkeys((row.operation, row.algorithm) for row in rows):
        mine = [row for row in rows if (row.operation, row.algorithm) == (operation, algorithm)]
        if algorithm == COPY or len(mine) < 2:
            continue
        points = [row.size_bytes for row in mine], [row.p50_s for row in mine]
        alpha, beta = fit_line(*points)
        residual, worst = quality(alpha, beta, *points)
        fits.append(
            Fit(
                operation=operation,
                algorithm=algorithm,
                alpha_s=alpha,
                beta_s_per_byte=beta,
                residual=residual,
                worst=worst,
                num_sizes=len(mine),
            )
        )
    return fits


def row_json(row: Row) -> dict[str, Any]:
    """As a dictionary of its fields."""
    return asdict(row)
