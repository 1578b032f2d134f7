"""From samples to figures, and these as tables, JSON and CSV. Pure; no torch.

`algbw` and `busbw` are nccl-tests' (its PERFORMANCE.md): size / time, and that times the part of
the tensor that must pass each rank's link, so that a ring at its best shows the link's speed.

    all_reduce 2 (n - 1) / n     reduce_scatter, all_gather (n - 1) / n     broadcast 1

For ranks that share a host's memory there is a yardstick: the least bytes that an operation must
move, at the rate at which a plain copy of S bytes moves its 2 S. That rate is measured beside the
operations, with all ranks busy at once: each one copies between two buffers of its own.

[Note: Least bytes] What the busiest of W ranks must at least read and write, for a tensor of S
bytes, when every rank's buffer can be reached by all and nothing is copied on the way:

    all_reduce       its share S/W of W buffers is read, and written into W buffers      2 S
    reduce_scatter   its share of W buffers is read, and written once              S + S/W
    all_gather       W parts of S/W are read and written                                 2 S
    broadcast        S is read and written                                               2 S

[Note: Beyond the limit] It is a yardstick rather than a bound, and an operation may pass it:

- A processor that writes to memory first reads the line that it writes to, unless it is in a cache
  already. A copy's destination is not: of S bytes it moves 3 S, and counts as 2 S. An operation in
  place has just read what it writes, and moves no more than it counts. So a pass in place reaches
  up to 150 % of the rate of a copy: all_reduce can.
- Caches: W ranks that copy hold 2 W S bytes, W ranks that all-reduce W S. Where the one is too much
  and the other fits, the copy goes to memory and the operation does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from typing import IO, Any

from gradsync.bench.collectives_plan import COPY, Settings, size_text
from gradsync.bench.report import csv_text, print_notes, print_table
from gradsync.bench.statistics import Spread, percentile, ratios, spread
from gradsync.plan.collectives import Fit, fit_line, quality

GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Times of one algorithm at one size."""

    operation: str
    """A name in `collectives_plan.OPERATIONS`."""
    algorithm: str
    """One of that operation's, or `COPY`."""
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
        """The median of each round, seconds."""
        return [percentile(times, 50) for times in self.rounds_s]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A table's line: one algorithm at one size."""

    operation: str
    """A name in `collectives_plan.OPERATIONS`."""
    algorithm: str
    """One of that operation's, or `COPY`."""
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
    """Time of the least bytes at the rate of a plain copy, where ranks share memory, seconds;
    None elsewhere, and for the copy."""
    of_limit: Spread | None
    """The operation's rate relative to a plain copy's, by rounds; what works in place may pass 1
    (see [Note: Beyond the limit])."""


def limit_s(operation: str, world_size: int, copy_s: float) -> float:
    """The time of an operation at the rate of a copy of as many bytes, which takes `copy_s` with
    all ranks copying at once; see [Note: Least bytes]."""
    return copy_s * (1 + 1 / world_size if operation == "reduce_scatter" else 2) / 2


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
    algbw = (2 * size if is_copy else size) / p50_s / GB
    limit, of_limit = None, None
    if one_memory and not is_copy:
        limits = [limit_s(samples.operation, world_size, s) for s in copy.medians_s]
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
    by_name: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row.algorithm != COPY:
            points = by_name.setdefault((row.operation, row.algorithm), {})
            points[row.size_bytes] = row.p50_s
    return [fit_of(*name, points) for name, points in by_name.items() if len(points) > 1]


def fit_of(operation: str, algorithm: str, points: Mapping[int, float]) -> Fit:
    """The line through `points`: seconds by bytes."""
    alpha, beta = fit_line(list(points), list(points.values()))
    residual, worst = quality(alpha, beta, list(points), list(points.values()))
    return Fit(
        operation=operation,
        algorithm=algorithm,
        alpha_s=alpha,
        beta_s_per_byte=beta,
        residual=residual,
        worst=worst,
        num_sizes=len(points),
    )


_OF_LIMIT = (
    "of limit: the least bytes of the operation, moved at the rate of the plain copy beside it. A "
    "copy reads the lines of its destination before it writes them, and has more buffers for the "
    "caches to hold; an operation in place (all_reduce) does not, and may pass 100%."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that there is to say."""

    settings: Settings
    """The request."""
    environment: dict[str, Any]
    """See `record.environment`."""
    num_nodes: int
    """Hosts."""
    rows: list[Row]
    """One per operation, size and algorithm."""
    fits: list[Fit]
    """One per operation and algorithm."""
    skipped: list[str]
    """Not measured: a line each."""
    wrong: list[str]
    """Not right: a line each."""

    @classmethod
    def of(cls, settings: Settings, result: Mapping[str, Any]) -> Report:
        """From what `collectives_measure.measure` returned."""
        rows = rows_of(
            [Samples(**entry) for entry in result["samples"]],
            result["environment"]["world_size"],
            one_memory=result["one_memory"],
        )
        same = ("environment", "num_nodes", "skipped", "wrong")
        kept = {name: result[name] for name in same}
        return cls(settings=settings, rows=rows, fits=fits_of(rows), **kept)

    def data(self) -> dict[str, Any]:
        """Everything but the environment and the samples, as JSON has it."""
        return {
            "passed": not self.wrong,
            "num_nodes": self.num_nodes,
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in self.rows],
            "fits": [fit.to_json() for fit in self.fits],
            "skipped": self.skipped,
            "wrong": self.wrong,
        }


def report_csv(report: Report) -> str:
    """One row per operation, size and algorithm; times in microseconds, empty for no number."""
    return csv_text(
        [
            {
                "operation": row.operation,
                "algorithm": row.algorithm,
                "size_bytes": row.size_bytes,
                "count": row.count,
                "dtype": report.settings.dtype,
                "world_size": report.environment["world_size"],
                "num_nodes": report.num_nodes,
                "repetitions": row.repetitions,
                "p50_us": round(row.p50_s * 1e6, 3),
                "p95_us": round(row.p95_s * 1e6, 3),
                "algbw_gbs": row.algbw_gbs,
                "busbw_gbs": row.busbw_gbs,
                "limit_us": None if row.limit_s is None else round(row.limit_s * 1e6, 3),
                "of_limit": None if row.of_limit is None else round(row.of_limit.median, 4),
            }
            for row in report.rows
        ]
    )


def print_report(report: Report, stream: IO[str]) -> None:
    """A table per operation, the fits, what was skipped and what was wrong."""
    found = report.environment
    device = found["accelerator"] if found["backend"].endswith("nccl") else found["cpu"]
    print(
        f"{found['world_size']} ranks on {report.num_nodes} host(s), {report.settings.dtype}, "
        f"{found['backend']}; {device}, {found['cores']} cores, load {found['load_at_start']} "
        f"at the start, torch {found['torch']}, {found['date']}",
        file=stream,
    )
    limited = any(row.of_limit is not None for row in report.rows)
    columns = ["size", "algorithm", "p50", "p95", "algbw GB/s", "busbw GB/s"]
    columns += ["of limit"] if limited else []
    for operation, rows in groupby(report.rows, key=lambda row: row.operation):
        cells = [
            _cells(row, first=not place)[: len(columns)]
            for _, entries in groupby(rows, key=lambda row: row.size_bytes)
            for place, row in enumerate(entries)
        ]
        print(file=stream)
        print_table(stream, operation, columns, cells, words=("algorithm",), framed=False)
    if limited:
        print(file=stream)
        print_notes(stream, (_OF_LIMIT,))
    if report.fits:
        columns = ["operation", "algorithm", "alpha", "1/beta GB/s"]
        columns += ["half of the sizes within", "worst factor"]
        cells = [
            (
                *(fit.operation, fit.algorithm, time_text(fit.alpha_s)),
                "" if not fit.beta_s_per_byte else rate_text(1 / fit.beta_s_per_byte / 1e9),
                *(f"{fit.residual:.0%}", f"{fit.worst:.2f}"),
            )
            for fit in report.fits
        ]
        print(file=stream)
        title = "seconds = alpha + beta * bytes"
        print_table(stream, title, columns, cells, words=columns[:2], framed=False)
    for line in (*(f"skipped: {s}" for s in report.skipped), *(f"WRONG {w}" for w in report.wrong)):
        print(line, file=stream)


def _cells(row: Row, *, first: bool) -> tuple[str, ...]:
    """A line of a table; the first one of a size names that."""
    return (
        size_text(row.size_bytes) if first else "",
        "copy (reads + writes)" if row.algorithm == COPY else row.algorithm,
        time_text(row.p50_s),
        time_text(row.p95_s),
        rate_text(row.algbw_gbs),
        "" if row.busbw_gbs is None else rate_text(row.busbw_gbs),
        "" if row.of_limit is None else f"{row.of_limit.median:.0%}",
    )


def time_text(seconds: float) -> str:
    """Three digits: `4.21 us`, `1.30 ms`, `2.05 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor or unit == "us":
            value = seconds / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


def rate_text(gbs: float) -> str:
    """Three digits, more where it is little."""
    return f"{gbs:.3g}" if gbs < 100 else f"{gbs:.0f}"
