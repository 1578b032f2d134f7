"""Line and area charts as SVG; the page sets the colours: light, dark, printed.

Text stays text, sizes follow the page, and nothing is loaded or executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480.0, 225.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 20.0, 38.0
_MOST_TOLD = 100
"""Points of a line that show their value under the pointer; more could not be distinguished."""
_MOST_POINTS = 400
COLORS = 6
LIGHT = "--c0:#2f6fdf;--c1:#d9601a;--c2:#1f8a5b;--c3:#9250c8;--c4:#b98900;--c5:#c2346c;"
"""Colours on white; a page may set others for a dark background."""
STYLE = (
    ".grid{stroke:var(--rule,#dfe3e8)}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".area{opacity:.85}svg text{fill:var(--soft,#667085);font-size:12px}"
    "svg .on{fill:var(--paper,#fff)}.event{stroke:var(--soft,#667085);stroke-dasharray:3 3}"
    ".event.bad{stroke:var(--bad,#b42318)}svg text.bad{fill:var(--bad,#b42318)}"
)
"""Styles of a chart's parts, in a page or alone."""

Point = tuple[float, float]


class Event(NamedTuple):
    """An event of a run: a number on the x axis, explained in a list below."""

    step: float
    words: str
    bad: bool = False
    number: int = 0  # In the list; 0: its place among the chart's
    color: int | None = None  # Its run's, if there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points, joined in their order."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dashed: bool = False
    marks: bool = False  # A dot at each point


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart's data."""

    title: str
    lines: Sequence[Line]
    x: str = "optimizer step"
    y: str = ""
    stacked: bool = False
    """Areas on top of each other; all lines have the same x."""
    from_zero: bool = False
    events: Sequence[Event] = ()


def svg(chart: Chart) -> str:
    """The chart; "" if there is nothing to draw."""
    lines = [replace(line, points=thinned(_finite(line.points))) for line in chart.lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    values = [line.points for line in lines]
    if chart.stacked:
        lines = _on_top(lines)
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_low, x_high = min(xs), max(xs)
    zero = chart.from_zero or chart.stacked
    y_ticks = ticks(0.0 if zero else min(ys), max(ys))
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">'
    ]
    for y in y_ticks:
        _, high = at(x_low, y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" {_y(high)}/>')
        parts.append(_text(_LEFT - 6, high + 4, number(y), "end"))
    for x in whole_ticks(x_low, x_high):
        across, _ = at(x, y_low)
        parts.append(_text(across, HEIGHT - _BOTTOM + 16, number(x), "middle"))
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - 3, chart.x, "end"))
    numbered = [e._replace(number=e.number or n) for n, e in enumerate(chart.events, 1)]
    for step in dict.fromkeys(e.step for e in numbered if x_low <= e.step <= x_high):
        here = [event for event in numbered if event.step == step]
        parts.append(_event(at(step, y_low)[0], here))
    floor = [(x, 0.0) for x, _ in lines[0].points]
    for line, said in zip(lines, values, strict=True):
        here = [at(x, y) for x, y in line.points]
        color = f"var(--c{line.color % COLORS})"
        if chart.stacked:
            under = [at(x, y) for x, y in reversed(floor)]
            parts.append(f'<path d="{_path([*here, *under])}Z" fill="{color}" class="area"/>')
            floor = list(line.points)
        else:
            dash = ' stroke-dasharray="6 4"' if line.dashed else ""
            parts.append(f'<path d="{_path(here)}" stroke="{color}" class="line"{dash}/>')
        parts += _told(line, said, here, color)
    return "".join([*parts, "</svg>"])


def _event(across: float, here: Sequence[Event]) -> str:
    """A line with the numbers of the events at one step."""
    kind, color = " bad" if any(event.bad for event in here) else "", here[0].color
    own = "" if color is None else f' style="stroke:var(--c{color % COLORS})"'
    words = "; ".join(event.words for event in here)
    return (
        f'<line class="event{kind}"{own} x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP - 4:g}" '
        f'y2="{HEIGHT - _BOTTOM:g}"/><text class="{kind.strip()}" x="{across:.1f}" '
        f'y="{_TOP - 7:g}" text-anchor="middle">{",".join(str(e.number) for e in here)}'
        f"<title>{escape(words)}</title></text>"
    )


def _told(line: Line, values: Sequence[Point], here: Sequence[Point], color: str) -> Iterator[str]:
    """Dots that show their values: visible if the line has marks, else only under the pointer."""
    seen = line.marks or len(here) == 1
    if seen or len(here) <= _MOST_TOLD:
        look = f'r="3" fill="{color}"' if seen else 'r="6" fill="transparent"'
        for (a, b), (x, y) in zip(here, values, strict=True):
            words = f"{line.name}: {number(y)} at {number(x)}".removeprefix(": ")
            title = f"<title>{escape(words)}</title>"
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" {look}>{title}</circle>'


def figure(chart: Chart) -> str:
    """The chart with its title and legend, as HTML; "" if there is nothing to draw."""
    drawn = svg(chart)
    if not drawn:
        return ""
    names = [
        f'<span><i style="color:var(--c{line.color % COLORS})"'
        f"{' class=dashed' if line.dashed else ''}></i>{escape(line.name)}</span>"
        for line in chart.lines
        if len(chart.lines) > 1 and _finite(line.points)
    ]
    unit = f" <small>{escape(chart.y)}</small>" if chart.y else ""
    head = f"<figcaption><b>{escape(chart.title)}</b>{unit}{''.join(names)}</figcaption>"
    return f"<figure>{head}{drawn}</figure>"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most a few hundred points: the lowest and the highest of each stretch, in their order."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-len(points) // (_MOST_POINTS // 2))
    kept = [points[0]]
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    if not high > low:
        spread = abs(low) / 10 or 1.0
        low, high = low - spread, high + spread
    step = _round_step((high - low) / (wanted - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * k, 12) for k in range(first, last + 1)]


def whole_ticks(low: float, high: float) -> list[float]:
    """Round whole numbers between `low` and `high`."""
    if high <= low:
        return [low]
    step = max(1.0, _round_step((high - low) / 6))
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * by for by in (1, 2, 2.5, 5, 10) if power * by >= rough * (1 - 1e-9))


def number(value: float) -> str:
    """A number in few characters: 12,300 as 12.3k, 0.000012 as 1.2e-05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.4g}"


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _on_top(lines: Sequence[Line]) -> list[Line]:
    total = [0.0] * len(lines[0].points)
    found = []
    for line in lines:
        total = [a + y for a, (_, y) in zip(total, line.points, strict=True)]
        points = [(x, t) for (x, _), t in zip(line.points, total, strict=True)]
        found.append(replace(line, points=points))
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _y(value: float) -> str:
    return f'y1="{value:.1f}" y2="{value:.1f}"'
