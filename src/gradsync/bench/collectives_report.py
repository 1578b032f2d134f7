"""The figures of `bench collectives` as tables, a JSON document and CSV rows."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from gradsync.bench.collectives_figures import Row, Samples, fits_of, row_json, rows_of
from gradsync.bench.collectives_plan import COPY, Settings, size_text
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.runtime.text_file import write_text

_WIDTH = 100
_OF_LIMIT = (
    "of limit: the least bytes of the operation, moved at the rate of the plain copy beside it. A "
    "copy reads the lines of its destination before it writes them, and has more buffers for the "
    "caches to hold; an operation in place (all_reduce) does not, and may pass 100%."
)
_COLUMNS = (
    *("operation", "algorithm", "size_bytes", "count", "dtype", "world_size", "num_nodes"),
    *("repetitions", "p50_us", "p95_us", "algbw_gbs", "busbw_gbs", "limit_us", "of_limit"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that there is to say."""

    settings: Settings
    """What was asked for."""
    environment: dict[str, Any]
    """See `environment.environment`."""
    num_nodes: int
    """Hosts."""
    samples: list[Samples]
    """All of them."""
    rows: list[Row]
    """One per operation, size and algorithm."""
    fits: list[Fit]
    """One per operation and algorithm."""
    skipped: list[str]
    """Not measured: a line each."""
    wrong: list[str]
    """Not right: a line each."""

    @classmethod
    def of(cls, settings: Settings, result: dict[str, Any], samples: list[Samples]) -> Report:
        """From what the ranks measured."""
        environment = result["environment"]
        rows = rows_of(samples, environment["world_size"], one_memory=result["one_memory"])
        return cls(
            settings=settings,
            environment=environment,
            num_nodes=result["num_nodes"],
            samples=samples,
            rows=rows,
            fits=fits_of(rows),
            skipped=result["skipped"],
            wrong=result["wrong"],
        )

    def data(self) -> dict[str, Any]:
        """Everything but the environment and the samples, as JSON has it."""
        return {
            "passed": not self.wrong,
            "num_nodes": self.num_nodes,
            "settings": asdict(self.settings),
            "rows": [row_json(row) for row in self.rows],
            "fits": [fit.to_json() for fit in self.fits],
            "skipped": self.skipped,
            "wrong": self.wrong,
        }

    def samples_json(self) -> list[dict[str, Any]]:
        """Every repetition's time."""
        return [asdict(entry) for entry in self.samples]


def write_csv(path: Path, report: Report) -> None:
    """One row per operation, size and algorithm; times in microseconds, empty for no number.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in report.rows:
        of_limit = None if row.of_limit is None else round(row.of_limit.median, 4)
        writer.writerow(
            {
                **{name: getattr(row, name) for name in _COLUMNS if hasattr(row, name)},
                "dtype": report.settings.dtype,
                "world_size": report.environment["world_size"],
                "num_nodes": report.num_nodes,
                "p50_us": round(row.p50_s * 1e6, 3),
                "p95_us": round(row.p95_s * 1e6, 3),
                "limit_us": None if row.limit_s is None else round(row.limit_s * 1e6, 3),
                "of_limit": of_limit,
            }
        )
    write_text(path, text.getvalue())


def print_report(report: Report, stream: TextIO) -> None:
    """A table per operation, the fits, what was skipped and what was wrong."""
    # A narrow terminal may wrap lines; words cut short could not be read.
    width = max(shutil.get_terminal_size().columns, _WIDTH)
    console = Console(
        file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True, width=width
    )
    found = report.environment
    where = found["accelerator"] if found["backend"].endswith("nccl") else found["cpu"]
    console.print(
        f"{found['world_size']} ranks on {report.num_nodes} host(s), {report.settings.dtype}, "
        f"{found['backend']}; {where}, {found['cores']} cores, load {found['load_at_start']} "
        f"at the start, torch {found['torch']}, {found['date']}"
    )
    for operation, rows in groupby(report.rows, key=lambda row: row.operation):
        console.print()
        console.print(operation, style="bold")
        console.print(_table(list(rows)))
    if any(row.of_limit is not None for row in report.rows):
        console.print()
        console.print(_OF_LIMIT, style="dim")
    if report.fits:
        console.print()
        console.print("seconds = alpha + beta * bytes", style="bold")
        console.print(_fits(report.fits))
    for line in report.skipped:
        console.print(f"skipped: {line}")
    for line in report.wrong:
        console.print("WRONG", style="bold red", end=" ")
        console.print(line)


def _table(rows: Sequence[Row]) -> Table:
    limited = any(row.of_limit is not None for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("size", justify="right")
    table.add_column("algorithm")
    for name in ("p50", "p95", "algbw GB/s", "busbw GB/s", *(["of limit"] if limited else [])):
        table.add_column(name, justify="right")
    for size, entries in groupby(rows, key=lambda row: row.size_bytes):
        for place, row in enumerate(entries):
            table.add_row(
                "" if place else size_text(size),
                "copy (reads + writes)" if row.algorithm == COPY else row.algorithm,
                time_text(row.p50_s),
                time_text(row.p95_s),
                rate_text(row.algbw_gbs),
                "" if row.busbw_gbs is None else rate_text(row.busbw_gbs),
                *([] if row.of_limit is None else [f"{row.of_limit.median:.0%}"]),
                style="dim" if row.algorithm == COPY else None,
            )
    return table


def _fits(fits: Sequence[Fit]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("operation", "algorithm"):
        table.add_column(name)
    for name in ("alpha", "1/beta GB/s", "half of the sizes within", "worst factor"):
        table.add_column(name, justify="right")
    for fit in fits:
        rate = "" if not fit.beta_s_per_byte else rate_text(1 / fit.beta_s_per_byte / 1e9)
        table.add_row(
            *(fit.operation, fit.algorithm, time_text(fit.alpha_s), rate),
            *(f"{fit.residual:.0%}", f"{fit.worst:.2f}"),
        )
    return table


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
