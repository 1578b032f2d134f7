"""Pictures of measurements, by matplotlib (extra `bench`); no window, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.bench.report import where
from gradsync.core.files import check_place
from gradsync.errors import ConfigError, RunError

if TYPE_CHECKING:
    from gradsync.bench.scaling import ScalingPlan, ScalingPoint
    from gradsync.bench.sync import ContestantRow
    from gradsync.bench.sync_plan import BenchPlan

_SUFFIXES = (".png", ".svg", ".pdf")
_INK, _SOFT, _GRID = "#1b1f24", "#6b7480", "#e3e7eb"
_COMPUTE, _EXPOSED, _HIDDEN = "#4f7cac", "#e4863b", "#e9b184"
_DASHED = (0, (4, 2))
_BAR = 0.62
_ROW_INCHES, _FRAME_INCHES = 0.42, 2.0
_ROOM = 1.22  # width over the longest bar's, so that its figures stand beside it
_MODES = {"weak": (_COMPUTE, 0.99, (8, 6)), "strong": (_EXPOSED, 1.01, (8, -14))}
"""Each mode's color, and where its intervals and figures stand beside the other's."""


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before anything is measured for it."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {', '.join(_SUFFIXES)}")
    check_place("--plot", path)
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'gradsync[bench]'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A contestant's step, ms."""

    name: str
    ideal: float  # `none` in its allocator setting
    computing: float
    exposed: float
    hidden: float  # what communication would add if nothing hid it; 0 where nothing can
    low: float  # quartiles of the whole
    high: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.computing + self.exposed

    @property
    def end(self) -> float:
        """Largest value that is drawn."""
        return max(self.step + self.hidden, self.high)


def bars_of(plan: BenchPlan, rows: Sequence[ContestantRow]) -> list[Bar]:
    """Lengths to draw: ratios to `none` of the same round, times `none`'s median. What else the
    machine did in a round met both."""
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


def plot_sync(
    path: Path,
    plan: BenchPlan,
    rows: Sequence[ContestantRow],
    title: str,
    environment: Mapping[str, Any],
) -> None:
    """Draw where each contestant's step goes: a bar each, in the table's order, beside the ideal.

    name      [ computation         ┆ exposed ][ hidden ]  ratio, ms
                                  ideal
    """
    bars = bars_of(plan, rows)
    figure, axes = _new_figure(10, _FRAME_INCHES + _ROW_INCHES * len(bars))
    places = range(len(bars))
    computing, steps = [bar.computing for bar in bars], [bar.step for bar in bars]
    exposed, hidden = [bar.exposed for bar in bars], [bar.hidden for bar in bars]
    axes.barh(places, computing, _BAR, color=_COMPUTE, label="computation")
    label = "exposed communication: the step waits for it"
    axes.barh(places, exposed, _BAR, left=computing, color=_EXPOSED, label=label)
    label = "hidden communication: it would come on top"
    hatched: dict[str, Any] = {"color": "none", "edgecolor": _HIDDEN, "hatch": "////"}
    axes.barh(places, hidden, _BAR, left=steps, linewidth=0, label=label, **hatched)
    spreads = [[bar.step - min(bar.low, bar.step) for bar in bars]]
    spreads.append([max(bar.high, bar.step) - bar.step for bar in bars])
    axes.errorbar(steps, places, xerr=spreads, fmt="none", ecolor=_SOFT, elinewidth=1)
    label = "no communication at all: the ideal"
    longest = max(bar.end for bar in bars)
    for place, bar in enumerate(bars):
        heights = [place - 0.5, place + 0.5]
        style: dict[str, Any] = {"color": _INK, "linewidth": 1.4, "ls": _DASHED}
        axes.plot([bar.ideal] * 2, heights, label=label, **style)
        label = "_"  # once in the legend
        digits = 0 if bar.step >= 100 else 1
        text = f"x {bar.step / bar.ideal:.2f}   {bar.step:,.{digits}f} ms"
        axes.text(bar.end + 0.012 * longest, place, text, va="center", color=_INK, fontsize=9.5)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * _ROOM)
    axes.set_xlabel("one training step, ms (quartiles over rounds: thin lines)", color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    _save(figure, path, title, where(environment))


def plot_scaling(
    path: Path,
    scaling: ScalingPlan,
    points: Sequence[ScalingPoint],
    threshold: float,
    notes: Sequence[str],
) -> None:
    """Draw efficiency over the number of ranks, with its interval."""
    figure, axes = _new_figure(8.5, 5.2)
    for mode in scaling.modes:
        color, shift, aside = _MODES[mode]
        chosen = [point for point in points if point.mode == mode]
        below = [point.efficiency - point.low for point in chosen]
        above = [point.high - point.efficiency for point in chosen]
        axes.errorbar(
            [point.world_size * shift for point in chosen],
            [point.efficiency for point in chosen],
            yerr=[below, above],
            color=color,
            marker="o",
            capsize=4,
            linewidth=1.8,
            label=f"{mode} scaling (bars: 95 % interval)",
        )
        for point in chosen[1:]:
            axes.annotate(
                f"{point.efficiency:.0%}",
                (point.world_size * shift, point.efficiency),
                xytext=aside,
                textcoords="offset points",
                color=color,
                fontsize=9.5,
            )
    sizes, highest = scaling.plan.world_sizes, max(point.high for point in points)
    axes.axhline(1.0, color=_INK, linewidth=1.2, label="perfect: one rank without any wrapper")
    label = f"threshold, {threshold:.0%}"
    axes.axhline(threshold, color=_SOFT, linewidth=1.2, ls=_DASHED, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.35)
    axes.set_ylim(0, max(1.1, 1.05 * highest))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("ranks", color=_INK)
    axes.set_ylabel("efficiency: speed-up per rank", color=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    _save(figure, path, scaling.title, *notes)


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its axes, without a frame on top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_INK, labelsize=10)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path, title: str, *notes: str) -> None:
    """Put title and legend above the axes, `notes` under them, and write the file."""
    figure.legend(
        loc="outside upper left",
        title=title,
        title_fontsize=11,
        alignment="left",
        ncols=2,
        frameon=False,
        fontsize=9.5,
    )
    figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=7.5, color=_SOFT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")
    except OSError as error:
        raise RunError(f"--plot {path}: {error.strerror}") from error
