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
from typing import Any

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
    """Of the step to `none`'s, over rounds."""
    num_comm_ops: float
    """Operations of a rank in a step; a batch of messages is one."""
    comm_bytes: float
    """Given to sockets by a rank in a step (mean over ranks); none through shared memory."""
    tokens_per_s: float
    """Of all ranks."""
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
    return [_row(plan, entry, results[entry.worker_set]) for entry in plan.entries]


def turns(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each round the mean over its steps, of the rank whose mean is the greatest.

    Ranks that never meet must not be compared step by step: the slowest one is another in each, and
    nobody waits for it. Ranks that meet end their steps together, and have nearly equal means.

    Args:
        by_rank: [rank][round][step].
    """
    rounds = zip(*by_rank, strict=True)
    return [max(map(fmean, ranks)) for ranks in rounds]


def _row(plan: Plan, entry: Entry, result: Mapping[str, Any]) -> Row:
    found: Mapping[str, Sequence[Mapping[str, Any]]] = result["contestants"]
    ranks = found[entry.label]
    own = turns([rank["step_s"] for rank in ranks])
    ideal = turns([rank["step_s"] for rank in found[plan.ideal_of(entry).label]])
    beyond = spread([mine - best for mine, best in zip(own, ideal, strict=True)]).median
    total = spread([1000 * seconds for seconds in own])
    tokens = len(ranks) * entry.batch_size * plan.settings.tokens
    times = [rank["comm_s"] for rank in ranks]
    memory = [rank["memory_bytes"] for rank in ranks]
    return Row(
        contestant=entry.label,
        keep_memory=result["keeps_memory"],
        total_ms=total,
        compute_ms=1000 * spread(turns([rank["compute_s"] for rank in ranks])).median,
        comm_ms=None if None in times else 1000 * max(times),
        exposed_ms=max(1000 * beyond, 0.0),
        ratio=spread(ratios(own, ideal)),
        num_comm_ops=fmean(rank["operations"] for rank in ranks),
        comm_bytes=fmean(rank["sent_bytes"] for rank in ranks),
        tokens_per_s=tokens / total.median * 1000,
        memory_bytes=None if None in memory else max(memory),
        final_loss=ranks[0]["losses"][-1],
    )
