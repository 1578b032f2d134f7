"""The table that `bench scaling` prints, and what must be said beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.bench.scaling_plan import ScalingPlan
from gradsync.bench.scaling_result import Point
from gradsync.bench.sync_report import spread_text, where

_WIDE = 160
_LEGEND = (
    "weak: a rank's batch stays; strong: the global batch stays. efficiency: speed-up per rank "
    "over one rank without any wrapper, of the same round (median; 95 % interval by the bootstrap "
    "over rounds)."
)


def print_report(
    scaling: ScalingPlan,
    points: Sequence[Point],
    *,
    threshold: float,
    notes: Sequence[str],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Table, legend, notes, where it was measured."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    table = Table(title=title(scaling), title_justify="left")
    table.add_column("mode")
    for heading in ("ranks", "batch a rank", "step, ms", "tokens/s", "speed-up", "efficiency"):
        table.add_column(heading, justify="right")
    table.add_column(f"at least {threshold:.0%}?")
    for point in points:
        table.add_row(
            point.mode,
            str(point.world_size),
            str(point.batch_size),
            spread_text(point.step_ms, 1),
            f"{point.tokens_per_s:,.0f}",
            f"{point.speedup:.2f}",
            _efficiency(point),
            "" if point.world_size == 1 else point.verdict,
        )
    console.print(table)
    for line in (*notes, _LEGEND, where(environment)):
        console.print(line, style="dim", highlight=False)


def title(scaling: ScalingPlan) -> str:
    """What was measured, in one line."""
    settings = scaling.plan.settings
    strategy = scaling.entry(scaling.modes[0], scaling.world_sizes[-1]).contestant.name
    return (
        f"Scaling of {strategy}: GPT {settings.model_size} "
        f"({settings.config.num_params() / 1e6:.1f} M parameters), {settings.dtype}, sequences of "
        f"{settings.tokens}; {settings.rounds} rounds of {settings.num_steps} steps"
    )


def notes_of(scaling: ScalingPlan, *, on_cpu: bool, cores: int) -> list[str]:
    """What a reader has to know to judge the figures."""
    notes, ranks = [], scaling.world_sizes[-1]
    threads = scaling.plan.settings.threads
    if on_cpu:
        notes.append(
            "All ranks on one host, on its CPU: they share caches and memory bandwidth. This is "
            "not how several hosts or GPUs scale."
        )
    if on_cpu and ranks * threads > cores:
        notes.append(
            f"WARNING: {ranks} ranks x {threads} thread(s) want more than the {cores} cores that "
            "there are: efficiency beyond that many ranks says nothing."
        )
    return notes


def _efficiency(point: Point) -> str:
    if point.world_size == 1:
        return "1"
    return f"{point.efficiency:.1%} ({point.low:.1%}-{point.high:.1%})"
