"""The picture of `bench scaling`: efficiency over the number of ranks, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync.bench.plot import COMPUTE, EXPOSED, INK, SOFT, head, new_figure, save
from gradsync.bench.scaling_plan import ScalingPlan
from gradsync.bench.scaling_report import title
from gradsync.bench.scaling_result import Point
from gradsync.bench.sync_report import where

_COLORS = {"weak": COMPUTE, "strong": EXPOSED}
_SHIFT = {"weak": 0.99, "strong": 1.01}
"""So that two intervals at one number of ranks stand side by side."""
_ASIDE = {"weak": (8, 6), "strong": (8, -14)}
"""Where a point's figure stands, so that those of two modes do not meet; points."""


def plot_scaling(
    path: Path,
    scaling: ScalingPlan,
    points: Sequence[Point],
    *,
    threshold: float,
    notes: Sequence[str],
    environment: Mapping[str, Any],
) -> None:
    """Draw it.

    Raises:
        RunError: the file could not be written.
    """
    figure, axes = new_figure(8.5, 5.2)
    for mode in scaling.modes:
        chosen = [point for point in points if point.mode == mode]
        _draw(axes, mode, chosen)
    axes.axhline(1.0, color=INK, linewidth=1.2, label="perfect: one rank without any wrapper")
    axes.axhline(
        threshold, color=SOFT, linewidth=1.2, ls=(0, (4, 2)), label=f"threshold, {threshold:.0%}"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(scaling.world_sizes, [str(size) for size in scaling.world_sizes])
    axes.minorticks_off()
    axes.set_xlim(scaling.world_sizes[0] * 0.85, scaling.world_sizes[-1] * 1.35)
    axes.set_ylim(0, max(1.1, 1.05 * max(point.high for point in points)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("ranks", color=INK)
    axes.set_ylabel("efficiency: speed-up per rank", color=INK)
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.8)
    head(figure, title(scaling))
    foot = "\n".join([*notes, where(environment)])
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=7.5, color=SOFT)
    save(figure, path)


def _draw(axes: Any, mode: str, points: Sequence[Point]) -> None:
    sizes = [point.world_size * _SHIFT[mode] for point in points]
    middle = [point.efficiency for point in points]
    axes.errorbar(
        *(sizes, middle),
        yerr=[
            [point.efficiency - point.low for point in points],
            [point.high - point.efficiency for point in points],
        ],
        color=_COLORS[mode],
        marker="o",
        capsize=4,
        linewidth=1.8,
        label=f"{mode} scaling (bars: 95 % interval)",
    )
    for point in points[1:]:
        axes.annotate(
            f"{point.efficiency:.0%}",
            (point.world_size * _SHIFT[mode], point.efficiency),
            xytext=_ASIDE[mode],
            textcoords="offset points",
            color=_COLORS[mode],
            fontsize=9.5,
        )
