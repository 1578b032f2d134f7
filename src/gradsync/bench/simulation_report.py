"""The table that `bench simulation` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.bench.simulation_plan import SimulationPlan
from gradsync.bench.simulation_result import LIMIT, Prediction
from gradsync.bench.sync_plan import SyncSettings
from gradsync.bench.sync_report import spread_text, where

_WIDE = 160
_LEGEND = (
    "predicted: from ranks that talk to nobody, as many and in the same round, and from lines "
    "through the collectives' times; never from the step itself. measured: the slowest rank's mean "
    "step. error: predicted over measured of the same round, less 1. from one rank: the same when "
    "only one rank alone is known. Medians (quartiles) over rounds."
)


def settings_text(settings: SyncSettings) -> str:
    """What was measured, in one line."""
    return (
        f"GPT {settings.model_size} ({settings.config.num_params() / 1e6:.1f} M parameters), "
        f"{settings.dtype}, sequences of {settings.tokens}; {settings.rounds} rounds of "
        f"{settings.num_steps} steps"
    )


def print_report(
    simulation: SimulationPlan,
    found: Sequence[Prediction],
    environment: Mapping[str, Any],
    stream: IO[str],
) -> None:
    """Table, legend, where it was measured."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    settings = simulation.plan.settings
    title = f"Steps predicted and measured: {settings_text(settings)}"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy")
    for heading in ("ranks", "predicted, ms", "measured, ms", "error", "from one rank"):
        table.add_column(heading, justify="right")
    table.add_column(f"within {LIMIT:.0%}?")
    for each in found:
        table.add_row(
            each.strategy,
            str(each.world_size),
            spread_text(each.predicted_ms, 1),
            spread_text(each.measured_ms, 1),
            f"{each.error.median:+.1%} ({each.error.low:+.1%} to {each.error.high:+.1%})",
            f"{each.error_from_one:+.1%}",
            "yes" if each.within else "no",
        )
    console.print(table)
    for line in (_LEGEND, where(environment)):
        console.print(line, style="dim", highlight=False)
