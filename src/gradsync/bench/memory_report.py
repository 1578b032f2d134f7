"""What `bench memory` prints: the formulas' bytes beside the measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.bench.memory_plan import LONGEST, SHAPES, MemoryCase
from gradsync.bench.sync_report import where

_WIDE = 160
_MIB = 2**20
_LEGEND = (
    "the largest size of a process (of the rank that took most): Python and torch are part of it, "
    "memory that ranks share counts in parts."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case."""

    shape: str
    case: str
    """Strategy and what is special."""
    predicted_bytes: int
    measured_bytes: int
    """Of the rank that took most."""
    parts: dict[str, int]
    """Of the prediction."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def row_of(case: MemoryCase, result: Mapping[str, Any]) -> Row:
    """From what `memory_run.measure` returned; without slack where an allocator gives everything
    back."""
    need = case.need(len(result["peak_bytes"]), result["kind"])
    if result["kind"] == "cpu" and not result["keeps_memory"]:
        need = replace(need, slack=0)
    return Row(
        shape=case.shape,
        case=str(case),
        predicted_bytes=need.total,
        measured_bytes=max(result["peak_bytes"]),
        parts=asdict(need),
    )


def print_report(rows: Sequence[Row], *, environment: Mapping[str, Any], stream: IO[str]) -> None:
    """Table, what the columns mean, where it was measured."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    table = Table(title="Memory of a rank, by formula and measured", title_justify="left")
    table.add_column("model")
    table.add_column("case")
    for heading in ("predicted, MiB", "measured, MiB", "predicted / measured"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.shape,
            row.case,
            f"{row.predicted_bytes / _MIB:,.0f}",
            f"{row.measured_bytes / _MIB:,.0f}",
            f"{row.ratio:.2f}",
        )
    console.print(table)
    shapes = [shape_text(name) for name in dict.fromkeys(row.shape for row in rows)]
    for line in (_LEGEND, *shapes, where(environment)):
        console.print(line, style="dim", highlight=False)


def shape_text(name: str) -> str:
    """A shape in one line."""
    model = SHAPES[name]
    return (
        f"{name}: {model.num_params() / 1e6:.1f} M parameters, {model.n_layer} blocks of width "
        f"{model.n_embd}, vocabulary {model.vocab_size:,}, leaves of "
        f"{min(model.block_size, LONGEST)} tokens"
    )
