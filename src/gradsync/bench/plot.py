"""Pictures of measurements, by matplotlib (extra `bench`); no window, no global state."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError, RunError

SUFFIXES = (".png", ".svg", ".pdf")
INK = "#1b1f24"
SOFT = "#6b7480"
COMPUTE = "#4f7cac"
EXPOSED = "#e4863b"
HIDDEN = "#e9b184"


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before anything is measured for it.

    Raises:
        ConfigError: matplotlib is missing, a file of another kind, a folder that is not there.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'gradsync[bench]'")


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its axes, without a frame on top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    dress(axes)
    return figure, axes


def dress(axes: Any) -> None:
    """Only what helps to read."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=10)
    axes.set_axisbelow(True)


def head(figure: Any, title: str) -> None:
    """Title and legend above the axes."""
    figure.legend(
        loc="outside upper left",
        title=title,
        title_fontsize=11,
        alignment="left",
        ncols=2,
        frameon=False,
        fontsize=9.5,
    )


def save(figure: Any, path: Path) -> None:
    """Write the file.

    Raises:
        RunError: it could not be written.
    """
    try:
        figure.savefig(path, dpi=150, facecolor="white")
    except OSError as error:
        raise RunError(f"--plot {path}: {error.strerror}") from error
