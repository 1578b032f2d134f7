"""Line and area charts, and a timeline of two steps, as SVG.

The page sets the colours: light, dark, printed. Text stays text, and nothing is loaded or executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import NamedTuple

from gradsync.core.files import read_bytes

WIDTH, HEIGHT = 480.0, 225.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 20.0, 38.0
_MOST_TOLD = 100
"""Points of a line that show their value under the pointer; more could not be distinguished."""
_MOST_POINTS = 400
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
    """An event of a run: a number above the x axis, its place in a list beside the charts."""

    step: float
    words: str
    bad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points, joined in their order."""

    name: str
    points: Sequence[Point]
    color: int = 0
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
    from_zero: bool = True
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
    y_ticks = ticks(0.0 if chart.from_zero else min(ys), max(ys))
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
        ends = f'x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{high:.1f}" y2="{high:.1f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(_text(_LEFT - 6, high + 4, number(y), "end"))
    for x in whole_ticks(x_low, x_high):
        across, _ = at(x, y_low)
        parts.append(_text(across, HEIGHT - _BOTTOM + 16, number(x), "middle"))
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - 3, chart.x, "end"))
    for step in dict.fromkeys(e.step for e in chart.events if x_low <= e.step <= x_high):
        meeting = {n: event for n, event in enumerate(chart.events, 1) if event.step == step}
        parts.append(_events(at(step, y_low)[0], meeting))
    floor = [(x, 0.0) for x, _ in lines[0].points]
    for line, said in zip(lines, values, strict=True):
        here = [at(x, y) for x, y in line.points]
        color = f"var(--c{line.color})"
        if chart.stacked:
            under = [at(x, y) for x, y in reversed(floor)]
            parts.append(f'<path d="{_path([*here, *under])}Z" fill="{color}" class="area"/>')
            floor = list(line.points)
        else:
            parts.append(f'<path d="{_path(here)}" stroke="{color}" class="line"/>')
        parts += _told(line, said, here, color)
    return "".join([*parts, "</svg>"])


def _events(across: float, meeting: Mapping[int, Event]) -> str:
    """A line with the numbers of the events at one step."""
    kind = "bad" if any(event.bad for event in meeting.values()) else ""
    words = "; ".join(event.words for event in meeting.values())
    return (
        f'<line class="event {kind}" x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP - 4:g}" '
        f'y2="{HEIGHT - _BOTTOM:g}"/><text class="{kind}" x="{across:.1f}" y="{_TOP - 7:g}" '
        f'text-anchor="middle">{",".join(map(str, meeting))}<title>{escape(words)}</title></text>'
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
        f'<span><i style="color:var(--c{line.color})"></i>{escape(line.name)}</span>'
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
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{letter}"
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


# -- timeline: when parts of a step ran, by the traces of `gradsync train --profile` ---------------

_NAMED = re.compile(r"(forward|backward|step|update|in|out|sum)(?: (\d+))?$")
_LIBRARY = re.compile(r"(?:gloo|nccl|c10d)[:_](all_?reduce|all_?gather|reduce_?scatter)\w*$")
_COLORS = {"forward": 0, "backward": 5, "step": 4, "update": 1, "in": 2, "sum": 2, "out": 3}
_WORDS = {
    "step": "step: the small message, norm, update",
    "update": "update of weights",
    "in": "a bucket's sums to their owners",
    "out": "to all ranks",
    "sum": "a bucket's sum",
}
_NONE, _LIBRARY_CALL = -1, -2
_SENDS = ("in", "out", "sum")
_WIDE, _MARGIN, _ROW, _BAR = 1000.0, 142.0, 30.0, 20.0
_ABREAST = 2  # bars in a row of sends, which may overlap
_MOST_RANKS = 4
_LARGEST = 400 * 2**20


class Span(NamedTuple):
    """A part of a step on one rank; times are microseconds."""

    rank: int
    kind: str
    bucket: int  # `_NONE`: none; `_LIBRARY_CALL`: a collective of torch's
    begin: float
    end: float


def read_spans(run: Path) -> list[Span]:
    """Spans of the newest trace of a run, the first ranks' only; [] without one."""
    folders = sorted(run.glob("profile_trace/iteration_*"), key=lambda p: p.stat().st_mtime)
    found: list[Span] = []
    for path in sorted(folders[-1].glob("rank*_trace.json")) if folders else ():
        rank = int(path.name.removeprefix("rank").partition("_")[0])
        try:
            events = json.loads(read_bytes(path, _LARGEST)) if rank < _MOST_RANKS else {}
        except (ValueError, OSError):  # of a rank that was killed
            continue
        for event in events.get("traceEvents", ()):
            if event.get("ph") == "X":
                name, begin, end = str(event["name"]), event["ts"], event["ts"] + event["dur"]
                if (named := _NAMED.match(name)) and event.get("cat") == "user_annotation":
                    found.append(Span(rank, named[1], int(named[2] or _NONE), begin, end))
                elif _LIBRARY.match(name) and end > begin:
                    found.append(Span(rank, "sum", _LIBRARY_CALL, begin, end))
    # If our collectives have names, the library's are only small messages.
    if any(span.kind in _SENDS and span.bucket != _LIBRARY_CALL for span in found):
        found = [span for span in found if span.bucket != _LIBRARY_CALL]
    first = min((span.begin for span in found), default=0.0)
    return [s._replace(begin=s.begin - first, end=s.end - first) for s in found]


def timeline(run: Path) -> str:
    """The picture with its legend, as HTML; "" if the run has no trace."""
    spans = read_spans(run)
    if not spans:
        return ""
    kinds = [kind for kind in _COLORS if any(span.kind == kind for span in spans)]
    names = "".join(
        f'<span><i style="color:var(--c{_COLORS[kind]})"></i>'
        f"{escape(_WORDS.get(kind, kind))}</span>"
        for kind in kinds
    )
    numbered = any(span.bucket >= 0 for span in spans)
    numbers = "; a number is a bucket, in the order of backward" if numbered else ""
    head = f"<b>Two steps</b> <small>ms{numbers}</small>"
    return f'<figure class="all"><figcaption>{head}{names}</figcaption>{_bars(spans)}</figure>'


def _bars(spans: Sequence[Span]) -> str:
    rows = [(rank, sends) for rank in sorted({s.rank for s in spans}) for sends in (False, True)]
    rows = [row for row in rows if any((s.rank, s.kind in _SENDS) == row for s in spans)]
    end = max(span.end for span in spans)
    height = _ROW * len(rows) + 26
    scale = (_WIDE - _MARGIN - 6) / end
    parts = [f'<svg viewBox="0 0 {_WIDE:g} {height:g}" role="img" aria-label="Two steps">']
    for number, (rank, sends) in enumerate(rows):
        words = f"rank {rank} {'communicates' if sends else 'computes'}"
        parts.append(_text(4, _ROW * number + 18, words, "start"))
    free = [[0.0] * _ABREAST for _ in rows]  # when the last bar in each lane of a row ends
    # Updates happen during a forward: they are drawn over it.
    for span in sorted(spans, key=lambda s: (s.kind == "update", s.begin)):
        row, sends = rows.index((span.rank, span.kind in _SENDS)), span.kind in _SENDS
        lane = free[row].index(min(free[row])) if sends else 0
        bar = _BAR / _ABREAST if sends else _BAR
        free[row][lane] = span.end
        top = _ROW * row + 4 + bar * lane
        left, width = _MARGIN + span.begin * scale, max((span.end - span.begin) * scale, 0.5)
        bucket = "" if span.bucket < 0 else f" {span.bucket + 1}"
        said = f"{span.kind}{bucket}: {(span.end - span.begin) / 1e3:.1f} ms"
        parts.append(
            f'<rect x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{bar:g}" '
            f'fill="var(--c{_COLORS[span.kind]})"><title>{said}</title></rect>'
        )
        if bucket and width > 9:
            parts.append(
                f'<text class="on" x="{left + width / 2:.1f}" y="{top + bar / 2 + 4:g}" '
                f'text-anchor="middle">{span.bucket + 1}</text>'
            )
    step = _round_step(end / 1e3 / 12)
    for mark in range(int(end / 1e3 / step) + 1):
        x = _MARGIN + mark * step * 1e3 * scale
        parts.append(_text(x, height - 6, f"{mark * step:g}", "middle"))
    return "".join([*parts, "</svg>"])
