"""From samples to rows: medians, quartiles, ratios to `none` of the same round. No torch here.

[Note: Exposed communication]
What nothing hid is what a step takes beyond the step of `none` in the same round, with the same
allocator setting: waiting for messages, copying for them, and computing more slowly because they
are under way; and waiting, step by step, for the rank that is the slowest in it, which those that
never meet do not do. So it means the same for everybody, whatever a contestant can tell about
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import IO, Any

from gradsync.bench.report import csv_text, print_table, spread_text, where
from gradsync.bench.statistics import Spread, ratios, spread
from gradsync.bench.sync_plan import Entry, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contestant."""

    contestant: str
    keep_memory: bool
    """Whether its processes did keep freed memory: it is not possible everywhere."""
    total_ms: Spread
    """A step, on the slowest rank (see `turns`); over rounds."""
    compute_ms: float
    """Forward and backward of it, until the last gradient, beside whatever goes on."""
    comm_ms: float | None
    """In collectives, if nothing hides them; None where that cannot be seen from outside."""
    exposed_ms: float
    """See [Note: Exposed communication]."""
    ratio: Spread
    """The step over `none`'s, over rounds."""
    num_comm_ops: float
    """Operations of a rank in a step; a batch of messages is one."""
    comm_bytes: float
    """Given to sockets by a rank in a step (mean over ranks); none through shared memory."""
    tokens_per_s: float
    """Tokens of all ranks."""
    memory_bytes: int | None
    """At the peak, above what the process had before; of the rank with the most."""
    final_loss: float
    """After the check's steps."""

    @property
    def comm_fraction(self) -> float | None:
        """Communication in units of the step."""
        return None if self.comm_ms is None else self.comm_ms / self.total_ms.median

    @property
    def exposed_fraction(self) -> float:
        """The part of the step that is exposed communication."""
        return self.exposed_ms / self.total_ms.median

    def as_json(self) -> dict[str, Any]:
        """All fields, and the fractions."""
        fractions = {
            "comm_fraction": self.comm_fraction,
            "exposed_fraction": self.exposed_fraction,
        }
        return asdict(self) | fractions


def rows_of(plan: Plan, results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per entry of the plan.

    Args:
        plan: what was measured.
        results: of each set, what `Runner.run` returned.
    """
    return [_row(plan, entry, results) for entry in plan.entries]


def turns(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each round the mean over its steps, of the rank whose mean is the greatest.

    Ranks that never meet must not be compared step by step: the slowest one is another in each, and
    no rank waits for it. Ranks that meet end their steps together, and have nearly equal means.

    Args:
        by_rank: [rank][round][step].
    """
    rounds = zip(*by_rank, strict=True)
    return [max(map(fmean, ranks)) for ranks in rounds]


def step_seconds(
    results: Sequence[Mapping[str, Any]], entry: Entry, part: str = "step_s"
) -> list[float]:
    """Each round's mean on the slowest rank; see `turns`.

    Args:
        results: of each set, what `Runner.run` returned.
        entry: whose.
        part: step_s or compute_s.
    """
    return turns([rank[part] for rank in results[entry.worker_set]["contestants"][entry.label]])


def _row(plan: Plan, entry: Entry, results: Sequence[Mapping[str, Any]]) -> Row:
    result = results[entry.worker_set]
    ranks: Sequence[Mapping[str, Any]] = result["contestants"][entry.label]
    own = step_seconds(results, entry)
    ideal = step_seconds(results, plan.ideal_of(entry))
    beyond = spread([mine - best for mine, best in zip(own, ideal, strict=True)]).median
    total = spread([1000 * seconds for seconds in own])
    tokens = len(ranks) * entry.batch_size * plan.settings.tokens
    times = [rank["comm_s"] for rank in ranks]
    memory = [rank["memory_bytes"] for rank in ranks]
    return Row(
        contestant=entry.label,
        keep_memory=result["keeps_memory"],
        total_ms=total,
        compute_ms=1000 * spread(step_seconds(results, entry, "compute_s")).median,
        comm_ms=None if None in times else 1000 * max(times),
        exposed_ms=max(1000 * beyond, 0.0),
        ratio=spread(ratios(own, ideal)),
        num_comm_ops=fmean(rank["operations"] for rank in ranks),
        comm_bytes=fmean(rank["sent_bytes"] for rank in ranks),
        tokens_per_s=tokens / total.median * 1000,
        memory_bytes=None if None in memory else max(memory),
        final_loss=ranks[0]["losses"][-1],
    )


_COLUMNS = (
    *("contestant", "keeps memory", "step, ms", "to none", "forward + backward, ms"),
    *("communication, ms", "exposed, ms", "operations", "sent, MB", "tokens/s", "memory, MB"),
)
_LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to none: the same over "
    "`none` of the same round and allocator setting. forward + backward: until the last gradient. "
    "communication: in collectives, if nothing hides them (- : cannot be seen from outside). "
    "exposed: what the step takes beyond `none`'s. sent: by a rank, through "
    "sockets. memory: peak of a rank above its start, pages shared by ranks counted in each."
)


def print_report(
    plan: Plan, rows: Sequence[Row], environment: Mapping[str, Any], stream: IO[str]
) -> None:
    """Table, what the columns mean, where it was measured."""
    cells = [
        (
            row.contestant,
            "yes" if row.keep_memory else "no",
            spread_text(row.total_ms, 1),
            spread_text(row.ratio, 3),
            f"{row.compute_ms:.1f}",
            "-" if row.comm_ms is None else f"{row.comm_ms:.1f}",
            f"{row.exposed_ms:.1f} ({row.exposed_fraction:.0%})",
            f"{row.num_comm_ops:.3g}",
            f"{row.comm_bytes / 1e6:.2f}",
            f"{row.tokens_per_s:,.0f}",
            "-" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}",
        )
        for row in rows
    ]
    notes = (_LEGEND, where(environment))
    print_table(stream, title(plan), _COLUMNS, cells, notes, words=("keeps memory",))


def title(plan: Plan) -> str:
    """The measurement, in one line."""
    settings, first = plan.settings, plan.entries[0]
    leaves = f", {settings.leaves_per_rank} leaves" if settings.leaves_per_rank > 1 else ""
    return (
        f"{settings.model_text}, {plan.sets[first.worker_set].world_size} ranks x "
        f"{first.batch_size} x {settings.tokens} tokens a step{leaves}; {settings.turns_text}"
    )


def rows_csv(plan: Plan, rows: Sequence[Row]) -> str:
    """A header and a line for each row; what could not be measured is empty.

    The first eight columns are those that other benchmarks have. `total_time_ms` is the median,
    `total_low_ms` and `total_high_ms` are quartiles.
    """
    settings = plan.settings
    return csv_text(
        [
            {
                "model_size": settings.model_size,
                "d_model": settings.config.n_embd,
                "num_layers": settings.config.n_layer,
                "total_time_ms": _digits(row.total_ms.median),
                "compute_time_ms": _digits(row.compute_ms),
                "comm_time_ms": _digits(row.comm_ms),
                "comm_fraction": _digits(row.comm_fraction),
                "num_comm_ops": _digits(row.num_comm_ops),
                "contestant": row.contestant,
                "keep_memory": "true" if row.keep_memory else "false",
                "world_size": plan.sets[entry.worker_set].world_size,
                "batch_size": entry.batch_size,
                "context_length": settings.tokens,
                "leaves_per_rank": settings.leaves_per_rank,
                "dtype": settings.dtype,
                "total_low_ms": _digits(row.total_ms.low),
                "total_high_ms": _digits(row.total_ms.high),
                "exposed_time_ms": _digits(row.exposed_ms),
                "exposed_fraction": _digits(row.exposed_fraction),
                "ratio_to_none": _digits(row.ratio.median),
                "ratio_low": _digits(row.ratio.low),
                "ratio_high": _digits(row.ratio.high),
                "comm_bytes": round(row.comm_bytes),
                "tokens_per_s": _digits(row.tokens_per_s),
                "memory_mb": None if row.memory_bytes is None else round(row.memory_bytes / 2**20),
            }
            for entry, row in zip(plan.entries, rows, strict=True)
        ]
    )


def _digits(value: float | None) -> str:
    """Five that count, without an exponent where it can be."""
    return "" if value is None else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
