"""The picture of `bench sync`: where each contestant's step goes, beside the ideal.

    name      [ computation         ┆ exposed ][ hidden ]  ratio, ms
                                  ideal

Lengths are ratios to `none` of the same round, times `none`'s median: what else the machine did in
a round met both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.bench.plot import COMPUTE, EXPOSED, HIDDEN, INK, SOFT, head, new_figure, save
from gradsync.bench.sync_plan import Plan
from gradsync.bench.sync_report import title, where
from gradsync.bench.sync_result import Row

_BAR = 0.62
_ROW_INCHES = 0.42
_FRAME_INCHES = 2.0
_ROOM = 1.22
"""Of the longest bar, so that its figures stand beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One contestant; ms."""

    name: str
    ideal: float
    """`none` in its allocator setting."""
    computing: float
    exposed: float
    hidden: float
    """What communication would add if nothing hid it; 0 where nothing can, whatever it took when it
    was timed apart."""
    low: float
    high: float
    """Quartiles of the whole."""

    @property
    def step(self) -> float:
        """The whole step."""
        return self.computing + self.exposed


def bars_of(plan: Plan, rows: Sequence[Row]) -> list[Bar]:
    """Lengths to draw, in the order of the rows."""
    known = {row.contestant: row for row in rows}
    found = []
    for entry, row in zip(plan.entries, rows, strict=True):
        ideal = known[plan.ideal_of(entry).label].total_ms.median
        step = row.ratio.median * ideal
        exposed = max(step - ideal, 0.0)
        timed = (row.comm_ms or 0.0) if entry.contestant.overlaps else 0.0
        found.append(
            Bar(
                name=row.contestant,
                ideal=ideal,
                computing=step - exposed,
                exposed=exposed,
                hidden=max(timed - exposed, 0.0),
                low=row.ratio.low * ideal,
                high=row.ratio.high * ideal,
            )
        )
    return found


def plot_sync(path: Path, plan: Plan, rows: Sequence[Row], environment: Mapping[str, Any]) -> None:
    """Draw it: one bar per contestant, in the table's order, from top to bottom.

    Raises:
        RunError: the file could not be written.
    """
    bars = bars_of(plan, rows)
    figure, axes = new_figure(10, _FRAME_INCHES + _ROW_INCHES * len(bars))
    _draw(axes, bars)
    _ideals(axes, bars)
    longest = max(max(bar.step + bar.hidden, bar.high) for bar in bars)
    for place, bar in enumerate(bars):
        end = max(bar.step + bar.hidden, bar.high) + 0.012 * longest
        axes.text(end, place, _figures(bar), va="center", color=INK, fontsize=9.5)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * _ROOM)
    axes.set_xlabel("one training step, ms (quartiles over rounds: thin lines)", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e7eb", linewidth=0.8)
    head(figure, title(plan))
    figure.supxlabel(where(environment), x=0.01, ha="left", fontsize=8, color=SOFT)
    save(figure, path)


def _draw(axes: Any, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    computing = [bar.computing for bar in bars]
    steps = [bar.step for bar in bars]
    axes.barh(places, computing, _BAR, color=COMPUTE, label="computation")
    axes.barh(
        *(places, [bar.exposed for bar in bars], _BAR),
        left=computing,
        color=EXPOSED,
        label="exposed communication: the step waits for it",
    )
    axes.barh(
        *(places, [bar.hidden for bar in bars], _BAR),
        left=steps,
        color="none",
        edgecolor=HIDDEN,
        hatch="////",
        linewidth=0,
        label="hidden communication: it would come on top",
    )
    spreads = [[bar.step - min(bar.low, bar.step) for bar in bars]]
    spreads.append([max(bar.high, bar.step) - bar.step for bar in bars])
    axes.errorbar(steps, places, xerr=spreads, fmt="none", ecolor=SOFT, elinewidth=1)


def _ideals(axes: Any, bars: Sequence[Bar]) -> None:
    """A line at `none`, along those that are compared with it."""
    label = "no communication at all: the ideal"
    for begin, end, ideal in _runs([bar.ideal for bar in bars]):
        heights = [begin - 0.5, end + 0.5]
        axes.plot([ideal, ideal], heights, color=INK, linewidth=1.4, ls=(0, (4, 2)), label=label)
        label = "_"  # once in the legend


def _runs(values: Sequence[float]) -> list[tuple[int, int, float]]:
    """Neighbours with one value, as (first, last, value)."""
    runs: list[tuple[int, int, float]] = []
    for place, value in enumerate(values):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], place, value)
        else:
            runs.append((place, place, value))
    return runs


def _figures(bar: Bar) -> str:
    digits = 0 if bar.step >= 100 else 1
    return f"x {bar.step / bar.ideal:.2f}   {bar.step:,.{digits}f} ms"
