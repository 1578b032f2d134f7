"""Pictures of measurements, by matplotlib (extra `bench`); no window, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradsync.bench.report import where
from gradsync.core.files import check_place
from gradsync.errors import ConfigError, RunError

_SUFFIXES = (".png", ".svg", ".pdf")
INK, SOFT, GRID = "#1b1f24", "#6b7480", "#e3e7eb"
COMPUTE, EXPOSED, _HIDDEN = "#4f7cac", "#e4863b", "#e9b184"
DASHED = (0, (4, 2))
_BAR = 0.62
_ROW_INCHES, _FRAME_INCHES = 0.42, 2.0
_ROOM = 1.22  # width over the longest bar's, leaves room for its figures


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before anything is measured."""
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
    hidden: float  # what communication would add without overlap; 0 if nothing can overlap
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


def plot_sync(path: Path, bars: Sequence[Bar], title: str, environment: Mapping[str, Any]) -> None:
    """Draw the parts of each contestant's step: a bar each, in the table's order, with the ideal.

    name      [ computation         ┆ exposed ][ hidden ]  ratio, ms
                                  ideal
    """
    figure, axes = new_figure(10, _FRAME_INCHES + _ROW_INCHES * len(bars))
    places = range(len(bars))
    computing, steps = [bar.computing for bar in bars], [bar.step for bar in bars]
    exposed, hidden = [bar.exposed for bar in bars], [bar.hidden for bar in bars]
    axes.barh(places, computing, _BAR, color=COMPUTE, label="computation")
    label = "exposed communication: the step waits for it"
    axes.barh(places, exposed, _BAR, left=computing, color=EXPOSED, label=label)
    label = "hidden communication: it would come on top"
    hatched: dict[str, Any] = {"color": "none", "edgecolor": _HIDDEN, "hatch": "////"}
    axes.barh(places, hidden, _BAR, left=steps, linewidth=0, label=label, **hatched)
    spreads = [[bar.step - min(bar.low, bar.step) for bar in bars]]
    spreads.append([max(bar.high, bar.step) - bar.step for bar in bars])
    axes.errorbar(steps, places, xerr=spreads, fmt="none", ecolor=SOFT, elinewidth=1)
    label = "no communication at all: the ideal"
    longest = max(bar.end for bar in bars)
    for place, bar in enumerate(bars):
        heights = [place - 0.5, place + 0.5]
        style: dict[str, Any] = {"color": INK, "linewidth": 1.4, "ls": DASHED}
        axes.plot([bar.ideal] * 2, heights, label=label, **style)
        label = "_"  # once in the legend
        digits = 0 if bar.step >= 100 else 1
        text = f"x {bar.step / bar.ideal:.2f}   {bar.step:,.{digits}f} ms"
        axes.text(bar.end + 0.012 * longest, place, text, va="center", color=INK, fontsize=9.5)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * _ROOM)
    axes.set_xlabel("one training step, ms (quartiles over rounds: thin lines)", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    save_figure(figure, path, title, where(environment))


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its axes, without a frame on top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=10)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Any, path: Path, title: str, *notes: str) -> None:
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
    figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=7.5, color=SOFT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")
    except OSError as error:
        raise RunError(f"--plot {path}: {error.strerror}") from error
