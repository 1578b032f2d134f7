"""Results as a table for people, a JSON document and CSV rows."""

from __future__ import annotations

import csv
import math
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from gradsync.verify.plan import Plan
from gradsync.verify.result import Result

_COLUMNS = (
    *("strategy", "world_size", "model", "dtype", "promise", "loaded_from", "status", "bitwise"),
    *("part_of_bound", "weights_sha256", "cause", "step", "sentence", "seconds"),
)
_PARTS = ("loss", "gradient", "weight", "state")
_WIDTH = 110
_MEASURES = ("max_abs", "max_rel", "max_ulp", "first_step", "first_name")


def document(plan: Plan, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """The document that `--json` prints."""
    made = {
        "passed": all(result.passed for result in results),
        "settings": asdict(plan.settings),
        "versions": {
            "gradsync": _version("gradsync"),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
        "cells": [asdict(result) for result in results if not result.loaded_from],
        "cross_load": [asdict(result) for result in results if result.loaded_from],
        "seconds": round(seconds, 1),
    }
    return _strict(made)


def _strict(value: Any) -> Any:
    """A value without nan and infinity, which JSON does not have: they become null."""
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One row per result; differences as `gradient_max_abs` and so on, empty for no number.

    Raises:
        OSError: the file cannot be written.
    """
    names = [f"{part}_{measure}" for part in _PARTS for measure in _MEASURES]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*_COLUMNS, *names])
        writer.writeheader()
        for result in results:
            row = {name: getattr(result, name) for name in _COLUMNS}
            for part, values in result.differences.items():
                row |= {f"{part}_{measure}": values[measure] for measure in _MEASURES}
            writer.writerow(_strict(row))


def print_report(results: Sequence[Result], seconds: float, stream: TextIO) -> None:
    """A row per strategy and dtype, then each reason of failures once."""
    # A narrow terminal may wrap lines; words cut short could not be read.
    width = max(shutil.get_terminal_size().columns, _WIDTH)
    # Messages of others are shown as they are: no markup in brackets, no pictures between colons.
    console = Console(
        file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True, width=width
    )
    cells = [result for result in results if not result.loaded_from]
    console.print(_table(cells))
    for alike in _by_reason(results):
        first, names = alike[0], ", ".join(result.name for result in alike)
        console.print(first.status, style="bold red", end=" ")
        if len(alike) == 1:
            console.print(f"{names}: {first.sentence}")
        else:
            console.print(f"{len(alike)} cells: {first.sentence}")
            console.print(f"    {names}")
        for line in first.tried:
            console.print(f"    tried: {line}")
    loads = [result for result in results if result.loaded_from]
    failed = sum(not result.passed for result in results)
    console.print(
        f"{len(cells)} cells and {len(loads)} checkpoints handed on, {failed} failed, "
        f"{seconds:.0f} s"
    )


def _by_reason(results: Sequence[Result]) -> list[list[Result]]:
    """Failed results, those with one reason together. Errors come from one mistake also where
    numbers in them (rank, port, address) differ."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if not result.passed:
            error = result.status == "error"
            gist = re.sub(r"\d+", "", result.sentence) if error else result.sentence
            groups.setdefault((result.status, gist, *result.tried), []).append(result)
    return list(groups.values())


def _table(cells: Sequence[Result]) -> Table:
    sizes = sorted({cell.world_size for cell in cells})
    table = Table(box=None, pad_edge=False)
    for name in ("strategy", "dtype", "promise", *(f"W={size}" for size in sizes)):
        table.add_column(name)
    for name in ("loss", "gradient", "weights", "of bound"):
        table.add_column(name, justify="right")
    for strategy, dtype in dict.fromkeys((cell.strategy, cell.dtype) for cell in cells):
        row = [cell for cell in cells if (cell.strategy, cell.dtype) == (strategy, dtype)]
        marks = [mark([cell for cell in row if cell.world_size == size]) for size in sizes]
        worst = [largest(row, part) for part in ("loss", "gradient", "weight")]
        bound = max(cell.part_of_bound for cell in row)
        table.add_row(strategy, dtype, row[0].promise, *marks, *map(short, worst), f"{bound:.0%}")
    return table


def mark(cells: Sequence[Result]) -> str:
    """One word for some cells: the worst of them."""
    for status in ("error", "failed"):
        if any(cell.status == status for cell in cells):
            return status
    if all(cell.bitwise for cell in cells):
        return "bitwise"
    return "lossy" if cells[0].promise == "lossy" else "rounding"


def largest(cells: Sequence[Result], part: str) -> float:
    """Largest relative difference of `part` from one rank's run; null in JSON was no number."""
    found = [cell.differences[part]["max_rel"] for cell in cells if cell.differences]
    return max((math.inf if value is None else value for value in found), default=0.0)


def short(value: float) -> str:
    """`0` or `3.1e-07`."""
    return "0" if value == 0 else f"{value:.1e}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
