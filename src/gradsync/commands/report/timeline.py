"""When the parts of a step ran: bars from the traces that `gradsync train --profile` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.core.files import read_bytes

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
_WIDTH, _LEFT, _ROW, _BAR = 1000.0, 142.0, 30.0, 20.0
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
        rank = int(re.sub(r"\D", "", path.name.partition("_")[0]) or 0)
        if rank < _MOST_RANKS and path.stat().st_size <= _LARGEST:
            try:
                events = json.loads(read_bytes(path, _LARGEST))["traceEvents"]
            except (ValueError, KeyError, TypeError, OSError):
                continue
            found += [span for event in events if (span := _span(rank, event)) is not None]
    # If our collectives have names, the library's are only small messages.
    if any(span.kind in _SENDS and span.bucket != _LIBRARY_CALL for span in found):
        found = [span for span in found if span.bucket != _LIBRARY_CALL]
    first = min((span.begin for span in found), default=0.0)
    return [s._replace(begin=s.begin - first, end=s.end - first) for s in found]


def _span(rank: int, event: Any) -> Span | None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    name, begin, length = (event.get(key) for key in ("name", "ts", "dur"))
    if not isinstance(begin, int | float) or not isinstance(length, int | float):
        return None
    if (named := _NAMED.match(str(name))) and event.get("cat") == "user_annotation":
        return Span(rank, named[1], int(named[2] or _NONE), begin, begin + length)
    if _LIBRARY.match(str(name)) and length > 0:
        return Span(rank, "sum", _LIBRARY_CALL, begin, begin + length)
    return None


def timeline(run: Path, name: str = "") -> str:
    """The picture with its legend, as HTML, headed by the run's `name`; "" if the run has no
    trace."""
    spans = read_spans(run)
    if not spans:
        return ""
    kinds = _kinds(spans)
    names = "".join(
        f'<span><i style="color:var(--c{_COLORS[kind]})"></i>'
        f"{escape(_WORDS.get(kind, kind))}</span>"
        for kind in kinds
    )
    numbered = any(span.bucket >= 0 for span in spans)
    numbers = "; a number is a bucket, in the order of backward" if numbered else ""
    of = f" of {escape(name)}" if name else ""
    head = f"<b>Two steps{of}</b> <small>ms{numbers}</small>"
    return f'<figure class="all"><figcaption>{head}{names}</figcaption>{_svg(spans)}</figure>'


def _kinds(spans: Sequence[Span]) -> list[str]:
    return [kind for kind in _COLORS if any(span.kind == kind for span in spans)]


def _svg(spans: Sequence[Span]) -> str:
    rows = [(rank, sends) for rank in sorted({s.rank for s in spans}) for sends in (False, True)]
    rows = [row for row in rows if any((s.rank, s.kind in _SENDS) == row for s in spans)]
    end = max(span.end for span in spans)
    height = _ROW * len(rows) + 26
    scale = (_WIDTH - _LEFT - 6) / end
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="Two steps">']
    for number, (rank, sends) in enumerate(rows):
        words = f"rank {rank} {'communicates' if sends else 'computes'}"
        parts.append(f'<text x="4" y="{_ROW * number + 18:g}">{words}</text>')
    free = [[0.0] * _ABREAST for _ in rows]  # when the last bar in each lane of a row ends
    # Updates happen during a forward: they are drawn over it.
    for span in sorted(spans, key=lambda s: (s.kind == "update", s.begin)):
        row, sends = rows.index((span.rank, span.kind in _SENDS)), span.kind in _SENDS
        lane = free[row].index(min(free[row])) if sends else 0
        bar = _BAR / _ABREAST if sends else _BAR
        free[row][lane] = span.end
        top = _ROW * row + 4 + bar * lane
        left, width = _LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.5)
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
    step = _tick(end / 1e3)
    for mark in range(int(end / 1e3 / step) + 1):
        x = _LEFT + mark * step * 1e3 * scale
        parts.append(
            f'<text x="{x:.1f}" y="{height - 6:g}" text-anchor="middle">{mark * step:g}</text>'
        )
    return "".join([*parts, "</svg>"])


def _tick(length_ms: float) -> float:
    return next((s for s in (1, 5, 10, 50, 100, 200, 500, 1000, 5000) if length_ms / s <= 12), 1e4)
