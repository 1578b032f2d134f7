"""One HTML page about one run or several: works without a network or a script, in light and dark
colours, on a phone and on paper."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import Any

from gradsync.commands.report.charts import LIGHT, STYLE, Chart, Event, Line, figure
from gradsync.commands.report.run import CHECKS, Points, Run
from gradsync.commands.report.timeline import timeline
from gradsync.core.files import counted
from gradsync.runtime.machine import busy

_SAID, _TRACED = 40, 200
"""The most log lines to show, without tracebacks and with them."""


_STYLE = (
    f":root {{{LIGHT}}}{STYLE}"
    + """
:root { color-scheme: light dark; print-color-adjust: exact;
  --ink: #1d2330; --soft: #667085; --paper: #ffffff;
  --card: #f6f7f9; --rule: #dfe3e8; --good: #197a3d; --bad: #b42318; }
@media screen and (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ef; --soft: #98a2b3; --paper: #14171c;
  --card: #1d2128; --rule: #333a45; --good: #5cc98a; --bad: #ff8a7a;
  --c0: #6ea3ff; --c1: #ff9a5c; --c2: #56c596; --c3: #c08cf0; --c4: #e5b93a; --c5: #f27aa6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.sub { color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: .6rem; }
.cards div { background: var(--card); border-radius: 8px; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: .82rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .7rem .8rem .4rem;
  break-inside: avoid; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: .2rem .9rem; align-items: baseline;
  margin-bottom: .3rem; }
figcaption small, figcaption span { color: var(--soft); font-size: .85rem; }
figcaption span { overflow-wrap: anywhere; }
figcaption i { display: inline-block; width: .9em; height: .6em; border-radius: 2px;
  margin-right: .35em; background: currentColor; }
figcaption i.tick { width: 2px; background: var(--good); }
figcaption i.dashed { width: 1.5em; height: 2px; vertical-align: middle; border-radius: 0;
  background: repeating-linear-gradient(90deg, currentColor 0 5px, transparent 5px 8px); }
svg { width: 100%; height: auto; display: block; margin-top: auto; }
svg text { font-variant-numeric: tabular-nums; }
.charts figure { display: flex; flex-direction: column; }
@media (max-width: 560px) { .charts svg text { font-size: 15px; } }
figure.all { margin-top: 1rem; overflow-x: auto; }
figure.all svg { min-width: 700px; }
.wide { overflow-x: auto; }
ol { margin: .2rem 0; padding-left: 1.6rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; max-width: 40rem;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; min-width: 4rem; }
th { vertical-align: bottom; } td:first-child { min-width: 7rem; }
td.n, th.n { text-align: right; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--card); padding: .7rem; border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .82rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
@media print { :root { font-size: 11px; }
  body { max-width: none; padding: 0; font-size: 11px; } h2 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; gap: .6rem; } figure.all svg { min-width: 0; }
  .screen { display: none; } .wide { overflow: visible; } tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; display: block; } }
"""
)


def page(runs: Sequence[Run]) -> str:
    """The whole document about one run, or several side by side."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    charts = "".join(figure(chart) for chart in charts_of(runs))
    parts = [
        f"<h1>{escape(title)}</h1>",
        _about(runs[0]) if len(runs) == 1 else _compared(runs),
        *(
            _happened(run, found, alone=len(runs) == 1)
            for run, found in zip(runs, _numbered(runs), strict=True)
        ),
        "<h2>Curves</h2>",
        f'<div class="charts">{charts}</div>' if charts else "<p>No step was logged yet.</p>",
        "".join(timeline(run.path, run.name if len(runs) > 1 else "") for run in runs[:4])
        or '<p class="sub screen">For a timeline of two steps, train with --profile STEP.</p>',
        *([_differences(runs)] if len(runs) > 1 else []),
        *(_details(run, alone=len(runs) == 1) for run in runs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · gradsync</title><style>{_STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


# -- charts ---------------------------------------------------------------------------------------


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All charts of the page; several runs are lines in each, with their events in their colour."""
    alone = len(runs) == 1
    events = _numbered(runs)

    def lines(metric: str, name: str = "") -> list[Line]:
        return [
            Line(name=name if alone else run.name, points=run.metrics.get(metric, []), color=k)
            for k, run in enumerate(runs)
        ]

    held_out = [
        replace(
            line,
            name="validation" if alone else f"{line.name}, validation",
            color=1 if alone else line.color,
            dashed=not alone,
            marks=alone,
        )
        for line in lines("val/loss")
    ]
    hidden = [replace(ln, points=_share(r)) for ln, r in zip(lines(""), runs, strict=True)]
    loss = [*lines("train/loss", "training"), *held_out]
    mfu = [
        replace(line, points=[(x, 100 * y) for x, y in line.points]) for line in lines("perf/mfu")
    ]
    arithmetic = _from_zero("Model FLOPs utilisation", "% of the device's peak in bf16", mfu)
    if not all(line.points for line in mfu):  # older runs
        arithmetic = _from_zero("Arithmetic", "TFLOP/s a device", lines("perf/tflops_per_device"))
    memory = lines("mem/max_reserved_gib", "measured")
    memory += [
        Line(
            name="planned" if alone else f"{run.name}, planned",
            points=run.planned_memory,
            color=1 if alone else k,
            dashed=True,
        )
        for k, run in enumerate(runs)
        if run.planned_memory and "mem/max_reserved_gib" in run.metrics
    ]
    found = [
        Chart(title="Loss", y="nats per token", lines=loss, checks=runs[0].checks if alone else ()),
        _from_zero("Tokens a second", "of all ranks", lines("perf/tokens_per_s")),
        *(
            replace(_step_parts(run, "" if alone else f", {run.name}"), events=its)
            for run, its in zip(runs[:4], events, strict=False)
        ),
        _from_zero("Exposed communication", "% of a step, not hidden behind computing", hidden),
        _from_zero("Learning rate", "", lines("optim/lr")),
        _from_zero("Norm of the mean gradient", "before clipping", lines("optim/grad_norm")),
        _from_zero("Memory", "GiB, rank 0 at its peak", memory),
        arithmetic,
    ]
    every = list(chain(*events))
    return [
        ch if ch.stacked else replace(ch, lines=[*_told_apart(ch.lines)], events=every)
        for ch in found
    ]


def _told_apart(lines: Iterable[Line]) -> Iterable[Line]:
    """`lines`; a line that covers an earlier one (runs with equal bits) is marked as equal."""
    first: dict[tuple[tuple[float, float], ...], str] = {}
    for line in lines:
        name = first.setdefault(tuple(line.points), line.name)
        yield line if name == line.name else replace(line, name=f"{line.name} (equal to {name})")


def _from_zero(title: str, y: str, lines: Sequence[Line]) -> Chart:
    return Chart(title=title, y=y, lines=lines, from_zero=True)


_PARTS = {
    "perf/forward_s": ("forward", 0),
    "perf/backward_s": ("backward", 5),
    "perf/update_s": ("update", 3),
    "comm/exposed_s": ("exposed communication", 1),
    "perf/data_s": ("waiting for data", 4),
}
"""Metrics of a step's parts: their names, and indices of their colours."""


_LONGEST_S = 1e9
"""The longest step to draw, seconds: a damaged file may contain more, or nan."""


def _step_parts(run: Run, behind: str) -> Chart:
    """Parts of a step's time, by the intervals between logged steps."""
    whole, *parts = (dict(run.metrics.get(name, [])) for name in ("perf/step_s", *_PARTS))
    names, colors = zip(*_PARTS.values(), strict=True)
    # Split models log neither forward nor backward, older runs not the update either.
    timed = [(x, [part.get(x, 0.0) for part in parts]) for x in whole if x in parts[-1]]
    known = [(x, each) for x, each in timed if all(abs(y) < _LONGEST_S for y in (whole[x], *each))]
    rest = [(x, 1e3 * max(0.0, whole[x] - sum(values))) for x, values in known]
    lines = [
        Line(name=name, points=[(x, 1e3 * values[k]) for x, values in known], color=color)
        for k, (name, color, part) in enumerate(zip(names, colors, parts, strict=True))
        if part
    ]
    others = "the rest" if parts[0] else "forward, backward" + ", update" * (not parts[2])
    return Chart(
        title=f"Where a step's time went{behind}",
        y="ms",
        lines=[*lines, Line(name=others, points=rest, color=2)],
        stacked=True,
    )


def _share(run: Run) -> Points:
    steps = dict(run.metrics.get("perf/step_s", []))
    exposed = run.metrics.get("comm/exposed_s", [])
    return [(x, 100 * y / steps[x]) for x, y in exposed if steps.get(x)]


# -- words ----------------------------------------------------------------------------------------


def figures_of(run: Run) -> list[tuple[str, str]]:
    """The figures at the top: words and value."""
    summary, since = run.summary, run.since
    found = [
        ("validation loss", summary.get("val_loss", run.last("val/loss"))),
        ("training loss", summary.get("final_train_loss", run.last("train/loss"))),
        ("steps", summary.get("steps", run.last_step)),
        ("tokens/s, all ranks", summary.get("tokens_per_s", run.last("perf/tokens_per_s"))),
    ]
    shown = [
        (name, _shown(value) + since * name.startswith("tokens"))
        for name, value in found
        if isinstance(value, int | float)
    ]
    fraction = summary.get("exposed_comm_fraction")
    if isinstance(fraction, int | float) and math.isfinite(fraction):
        shown.append(("exposed communication", f"{100 * fraction:.1f} %{since}"))
    mfu, rate = run.last("perf/mfu"), run.last("perf/tokens_per_s")
    mean = summary.get("tokens_per_s", rate)  # of all its steps
    if mfu is not None and rate and isinstance(mean, int | float):
        shown.append(("MFU: model FLOPs utilisation", f"{100 * mfu * mean / rate:.1f} %{since}"))
    if memory := run.metrics.get("mem/max_reserved_gib"):
        shown.append(("GiB, peak of rank 0", _shown(max(value for _, value in memory))))
    if isinstance(summary.get("weights_sha256"), str):
        shown.append(("SHA-256 of the weights", f"{summary['weights_sha256'][:8]}…"))
    return shown


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4f}"


def _about(run: Run) -> str:
    figures = ((name, *value.partition(" since ")) for name, value in figures_of(run))
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name + since + step)}</span></div>"
        for name, value, since, step in figures
    )
    return f'<p class="sub">{_sentence(run)}</p><div class="cards">{cards}</div>'


def _numbered(runs: Sequence[Run]) -> list[list[Event]]:
    """The events of each run; with several, numbered in sequence and in the run's colour."""
    if len(runs) == 1:
        return [runs[0].events]
    numbers = count(1)
    return [
        [event._replace(number=next(numbers), color=k) for event in run.events]
        for k, run in enumerate(runs)
    ]


def _happened(run: Run, events: Sequence[Event], *, alone: bool) -> str:
    """The run's events, by their numbers in the charts, and its comparisons of bits."""
    listed = "".join(
        f"<li{' class=bad' if event.bad else ''}>{escape(event.words)}</li>" for event in events
    )
    first = events[0].number if events else 0
    title = "Events" if alone else f"Events of {escape(run.name)}"
    start = f' start="{first}"' if first > 1 else ""
    told = f"<ol{start}>{listed}</ol>" if listed else ""
    told += "".join(f"<p>{escape(words)}</p>" for words in _checked(run))
    return f"<h2>{title}</h2>{told}" if told else ""


def _checked(run: Run) -> Iterator[str]:
    """A sentence for each kind of comparison between the ranks' bits."""
    for metric, (name, when) in CHECKS.items():
        if points := run.metrics.get(metric):
            unequal = [f"{step:g}" for step, equal in points if not equal]
            found = f"different bits {when} {', '.join(unequal)}" if unequal else "equal bits"
            times = "once" if len(points) == 1 else f"{len(points)} times, last"
            yield f"{name.capitalize()} {times} {when} {points[-1][0]:g}: {found}"


def _sentence(run: Run) -> str:
    environment, config = run.environment, run.config
    ranks = _ranks_of(run, counted(environment.get("world_size"), "rank"))
    words = [
        f"{config.get('preset', 'model')}, sync {config.get('sync', '?')}",
        f"{ranks} by {environment.get('launcher', '?')}",
        f"{environment.get('device', '?')}, torch {environment.get('torch', '?')}",
    ]
    if peak := environment.get("peak_tflops"):
        about = "about " if str(environment.get("peak_source")).startswith("estimate") else ""
        words.append(f"{about}{peak} TFLOP/s a device at best")
    kind = "good" if run.exit.get("exit_code") == 0 else "bad" if run.exit else ""
    ended = f'<span class="{kind}">{escape(run.outcome)}</span>'
    return f"{escape(' · '.join(map(str, words)))} · {ended}"


def _compared(runs: Sequence[Run]) -> str:
    """The runs' figures: a column for each run, which also fits a phone."""
    columns = [{"ended": run.outcome} | dict(figures_of(run)) for run in runs]
    for run, column in zip(runs, columns, strict=True):
        load, cores = (run.environment.get(name) for name in ("load_at_start", "cores"))
        if isinstance(load, int | float) and isinstance(cores, int) and busy(load, cores):
            column["at the start"] = busy(load, cores)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return _same_bits(runs) + _table(("", *(run.name for run in runs)), rows)


def _ranks_of(run: Run, last: str = "") -> str:
    last = last or str(run.environment.get("world_size", "not known"))
    return ", then ".join([*(f"{n:g}" for n in run.ranks[:-1]), last])


def _same_bits(runs: Sequence[Run]) -> str:
    """The runs that ended with equal weights, a sentence for each group."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if isinstance(digest := run.summary.get("weights_sha256"), str):
            groups.setdefault(digest, []).append(f"{run.name} (ranks: {_ranks_of(run)})")
    return "".join(
        f'<p class="good">The same weights, bit for bit: {escape(", ".join(names))}</p>'
        for names in groups.values()
        if len(names) > 1
    )


_OF_A_START = ("out", "nproc_per_node", "resume")
"""Settings that do not affect the computation."""
_PATHS = ("data", "tokenizer", "init")


def _differences(runs: Sequence[Run]) -> str:
    """Settings in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [
        (name, *(_setting(name, run.config) for run in runs))
        for name in names
        if name not in _OF_A_START and len({_plain(name, run.config) for run in runs}) > 1
    ]
    ranks = list(map(_ranks_of, runs))
    if len({*ranks}) > 1:
        rows.insert(0, ("ranks", *ranks))
    if not rows:
        return "<h2>Settings</h2><p>The runs have the same settings.</p>"
    return "<h2>Settings that differ</h2>" + _table(("", *(run.name for run in runs)), rows)


def _plain(name: str, config: Mapping[str, Any]) -> str:
    value = str(config.get(name))
    return str(Path(value).absolute()) if name in _PATHS and config.get(name) else value


def _setting(name: str, config: Mapping[str, Any]) -> str:
    """A setting's value in words, including a default value."""
    if name not in config:
        return "not known"
    if config[name] in ("", None):
        return "the built-in text" if name == "data" else "default"
    return str(config[name])


def _details(run: Run, *, alone: bool) -> str:
    head = "" if alone else f"<h2>{escape(run.name)}</h2><p class=sub>{_sentence(run)}</p>"
    every = [line for line in log_lines(run) if " INFO " not in line]
    said = [line for line in every if _tells_more(line, str(run.exit.get("error", "")))]
    parts = [head]
    if run.problems:
        listed = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
        parts.append(f"<h2>Could not be read</h2><ul>{listed}</ul>")
    if said:
        parts.append(f"<h2>Warnings and errors</h2>{_lines(said[-_SAID:])}")
    known = [
        _folded("Settings", _table(("", ""), _pairs(_set(run.config)))),
        _folded("Environment", _table(("", ""), _pairs(run.environment))),
    ]
    on_screen = [_folded("Numbers", _numbers(run)), *([] if alone else known)]
    if len(said) < len(every):
        on_screen.insert(0, _folded("With tracebacks", _lines(every[-_TRACED:])))
    parts += [f'<div class="screen">{"".join(on_screen)}</div>', *(known if alone else [])]
    return "".join(parts)


def _lines(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _tells_more(line: str, error: str) -> bool:
    """Whether a log line is not from a traceback and does not repeat `error`."""
    words = line.partition("] ")[2]
    if words.startswith(("  ", "Traceback (", "During handling", "The above exception")):
        return False
    told = words.partition(": ")[2]
    return words[:1].isdigit() or not (told and told in error)


def log_lines(run: Run) -> list[str]:
    """Lines of all ranks' logs, rank by rank."""
    found = []
    for path in sorted((run.path / "logs").glob("rank_*.log")):
        rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
        lines = path.read_text("utf-8", errors="replace").splitlines()
        found += [f"[{rank}] {line}" for line in lines]
    return found


def _numbers(run: Run) -> str:
    names = [name for name in run.metrics if name not in CHECKS]
    steps = sorted({x for name in names for x, _ in run.metrics[name]})
    shown = steps[:-1][:: -(-len(steps) // 200) or 1] + steps[-1:]
    values = {name: dict(points) for name, points in run.metrics.items()}
    rows = [
        (f"{step:.0f}", *(f"{values[n][step]:.6g}" if step in values[n] else "" for n in names))
        for step in shown
    ]
    return _table(("step", *names), rows, right=True)


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that have a value: most are not set in most runs."""
    return {name: value for name, value in config.items() if value not in (None, "")}


def _pairs(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, shlex.join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in document.items()
    ]


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    kind = ' class="n"' if right else ""
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    top = "".join(f"<th{kind}>{escape(cell)}</th>" for cell in head) if any(head) else ""
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if top else ""}{body}</table></div>'
