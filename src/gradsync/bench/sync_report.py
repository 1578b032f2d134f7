"""The table that `bench sync` prints, and the lines under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.bench.statistics import Spread
from gradsync.bench.sync_plan import Plan
from gradsync.bench.sync_result import Row

_WIDE = 240
"""Columns where nobody watches: a table in a file must not be cut."""
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
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    table = Table(title=title(plan), title_justify="left")
    table.add_column("contestant")
    table.add_column("keeps memory")
    for heading in (
        *("step, ms", "to none", "forward + backward, ms", "communication, ms", "exposed, ms"),
        *("operations", "sent, MB", "tokens/s", "memory, MB"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = row.memory_bytes
        table.add_row(
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
            "-" if memory is None else f"{memory / 2**20:.0f}",
        )
    console.print(table)
    console.print(_LEGEND, style="dim", highlight=False)
    console.print(where(environment), style="dim", highlight=False)


def title(plan: Plan) -> str:
    """What was measured, in one line."""
    settings, first = plan.settings, plan.entries[0]
    leaves = f", {settings.leaves_per_rank} leaves" if settings.leaves_per_rank > 1 else ""
    return (
        f"GPT {settings.model_size} ({settings.config.num_params() / 1e6:.1f} M parameters), "
        f"{settings.dtype}, {plan.sets[first.worker_set].world_size} ranks x {first.batch_size} x "
        f"{settings.tokens} tokens a step{leaves}; {settings.rounds} rounds of "
        f"{settings.num_steps} steps"
    )


def where(environment: Mapping[str, Any]) -> str:
    """The machine, in one line."""
    device = environment["accelerator"] or environment["cpu"]
    return (
        f"{environment['date']}, {device}, {environment['cores']} cores (load "
        f"{environment['load_at_start']} at the start), torch {environment['torch']}, "
        f"{environment['threads_per_rank']} thread(s) a rank, {environment['backend']}"
    )


def spread_text(values: Spread, digits: int) -> str:
    """`median (first quartile-third quartile)`; a single value is alone."""
    middle = f"{values.median:.{digits}f}"
    if values.count == 1:
        return middle
    return f"{middle} ({values.low:.{digits}f}-{values.high:.{digits}f})"
