"""Repeated measurements as medians, quartiles and ratios; tables, CSV and progress. No torch."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from gradsync.core.files import counted

_RESAMPLES = 4000
_WIDE = 240  # columns of a file: a table in it must not be cut


@dataclass(frozen=True, slots=True)
class Spread:
    """Range of the middle half of `count` measurements: median, first and third quartile."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int) -> str:
        """`median (first quartile-third quartile)`; for a single value, the value."""
        middle = f"{self.median:.{digits}f}"
        if self.count == 1:
            return middle
        return f"{middle} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of 100 do not exceed; interpolated linearly between two of them."""
    import numpy as np

    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    low, median, high = (percentile(values, percent) for percent in (25, 50, 75))
    return Spread(median=median, low=low, high=high, count=len(values))


def ratios(values: Sequence[float], ideal: Sequence[float]) -> list[float]:
    """`values` over `ideal`, each round by the same round: disturbances affect both."""
    return [value / best for value, best in zip(values, ideal, strict=True)]


def interval(values: Sequence[float], *, doubt: float = 0.05) -> tuple[float, float]:
    """Confidence interval of the median, by the bootstrap over rounds (Efron 1979); `doubt` is 0.05
    for 95 %. The same values give the same interval."""
    import numpy as np

    places = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[places], axis=1)
    low, high = np.quantile(medians, [doubt / 2, 1 - doubt / 2])
    return float(low), float(high)


def print_table(
    stream: IO[str],
    title: str,
    rows: Sequence[Mapping[str, str]],
    notes: Iterable[str] = (),
    *,
    words: Collection[str] = (),
) -> None:
    """A table of at least one row, each by column, then notes, one paragraph each; lines in a file
    are not cut. `words` are the columns without numbers, as the first one."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if place and heading not in words else "left")
    for row in rows:
        table.add_row(*row.values())
    width = None if stream.isatty() else _WIDE
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
    console.print(table)
    for line in notes:
        console.print(line, style="dim", soft_wrap=not stream.isatty())


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and one line per row (at least one row); None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def where(environment: Mapping[str, Any]) -> str:
    """The machine, in one line."""
    device = environment["accelerator"] or environment["cpu"]
    return (
        f"{environment['date']}, {device}, {environment['cores']} cores (load "
        f"{environment['load_at_start']} at the start), torch {environment['torch']}, "
        f"{counted(environment['threads_per_rank'], 'thread')} a rank, {environment['backend']}"
    )


def show_progress(place: int, count: int, what: str) -> None:
    """A line for each tenth of the work: items done, items in all, what comes now."""
    if 10 * place % count < 10:
        say(f"{place} of {count} done, next: {what}")


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"gradsync: {text}", file=sys.stderr, flush=True)
