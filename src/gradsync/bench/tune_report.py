"""What `gradsync tune` prints: a table of each stage, and its verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.bench.statistics import Spread
from gradsync.bench.sync_report import spread_text, where
from gradsync.bench.tune_plan import TuneRequest

_WIDE = 160
"""Columns where nobody watches: a table in a file must not be cut."""
_LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to none: the same over "
    "ranks that never talk. to the default: median of the ratios within rounds, and the "
    "bootstrap's 95 % interval, widened for the number of candidates; below 1 is faster. The "
    "default is there twice: what its copies differ by is noise."
)


def print_report(
    request: TuneRequest,
    stages: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Tables, verdicts, what the columns mean, where it was measured."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    console.print(title(request), highlight=False)
    for stage in stages:
        if "decision" in stage:
            console.print(_table(stage))
    for line in verdicts(stages):
        console.print(line, highlight=False, markup=False)
    console.print(_LEGEND, style="dim", highlight=False)
    console.print(where(environment), style="dim", highlight=False)


def title(request: TuneRequest) -> str:
    """What is measured, in one line."""
    settings = request.settings
    return (
        f"GPT {settings.model_size} ({settings.config.num_params() / 1e6:.1f} M parameters), "
        f"{settings.dtype}, {request.world_size} ranks x {settings.leaves_per_rank} leaves x "
        f"{request.batch_size // settings.leaves_per_rank} x {settings.tokens} tokens a step; "
        f"{settings.rounds} rounds of {settings.num_steps} steps; promise: {request.promise}"
    )


def verdicts(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each stage."""
    return [
        f"{stage['name']}: {stage['decision']['words']}"
        if "decision" in stage
        else f"{stage['name']}: not measured: {stage['skipped']}"
        for stage in stages
    ]


def _table(stage: Mapping[str, Any]) -> Table:
    judged = {each["label"]: each for each in stage["decision"]["judged"]}
    table = Table(title=stage["name"], title_justify="left")
    table.add_column("candidate")
    for heading in ("step, ms", "to none", "to the default", "sent, MB", "verdict"):
        table.add_column(heading, justify="right")
    for row in stage["rows"]:
        beside = judged.get(row["contestant"])
        ratio = verdict = ""
        if beside is not None:
            ratio = f"{beside['ratio']:.3f} ({beside['low']:.3f}-{beside['high']:.3f})"
            verdict = (
                "faster" if beside["faster"] else "slower" if beside["low"] > 1 else "cannot tell"
            )
        table.add_row(
            row["contestant"],
            spread_text(Spread(**row["total_ms"]), 1),
            spread_text(Spread(**row["ratio"]), 3),
            ratio,
            f"{row['comm_bytes'] / 1e6:.2f}",
            verdict,
        )
    return table
