"""The picture of `gradsync plan --simulate`: efficiency over the number of ranks, per strategy."""

from __future__ import annotations

from pathlib import Path

from gradsync.bench.plot import COMPUTE, EXPOSED, HIDDEN, INK, SOFT, head, new_figure, save
from gradsync.hardware.simulate.crossover import HALF
from gradsync.hardware.simulate.report import notes
from gradsync.hardware.simulate.simulation import Simulation

_COLORS = (COMPUTE, EXPOSED, "#5a9367", "#8d6a9f", HIDDEN, "#b5485d", SOFT, INK)
_MARKERS = "osD^vPX*"


def plot_simulation(path: Path, found: Simulation) -> None:
    """Draw it; `bench.plot.check_plot` says beforehand whether that will work.

    Raises:
        RunError: the file could not be written.
    """
    figure, axes = new_figure(9.5, 5.6)
    for number, name in enumerate(found.names):
        points = [point for point in found.points if point.name == name]
        axes.plot(
            [point.world_size for point in points],
            [point.efficiency for point in points],
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linewidth=1.8,
            label=name,
        )
    axes.axhline(HALF, color=SOFT, linewidth=1.2, ls=(0, (4, 2)), label=f"{HALF:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(found.world_sizes, [str(size) for size in found.world_sizes])
    axes.minorticks_off()
    axes.set_ylim(0, max(1.1, 1.05 * max(point.efficiency for point in found.points)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("ranks", color=INK)
    axes.set_ylabel("efficiency", color=INK)
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.8)
    head(figure, "Simulated training steps")
    figure.supxlabel("\n".join(notes(found)), x=0.01, ha="left", fontsize=7.5, color=SOFT)
    save(figure, path)
