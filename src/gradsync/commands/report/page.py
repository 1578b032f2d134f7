"""One HTML page about one run or several, from the template `page.html.j2`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import chain, count
from pathlib import Path
from typing import Any

from gradsync.commands.report.charts import LIGHT, STYLE, Chart, Event, Line, figure
from gradsync.commands.report.run import CHECKS, Points, Run
from gradsync.commands.report.timeline import timeline
from gradsync.core.files import counted
from gradsync.runtime.machine import busy

_MOST_LINES = 40
"""The most log lines to show."""
_MOST_ROWS = 200
"""The most steps in the table of numbers."""
_IN_DETAIL = 4
"""The most runs whose parts of a step, and timelines, are drawn."""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows."""


def page(runs: Sequence[Run]) -> str:
    """The whole document about one run, or several side by side."""
    from jinja2 import Environment, StrictUndefined

    alone = len(runs) == 1
    source = resources.files("gradsync.commands.report").joinpath("page.html.j2")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    drawn = [timeline(run.path, "" if alone else run.name) for run in runs[:_IN_DETAIL]]
    return environment.from_string(source.read_text("utf-8")).render(
        title=runs[0].name if alone else f"{len(runs)} runs",
        light=LIGHT,
        chart_style=STYLE,
        alone=alone,
        runs=[_told(run, events) for run, events in zip(runs, _numbered(runs), strict=True)],
        same_bits=_same_bits(runs),
        compared=_compared(runs),
        charts="".join(map(figure, charts_of(runs))),
        timelines="".join(drawn),
        differences=_differences(runs),
    )


def _told(run: Run, events: Sequence[Event]) -> dict[str, Any]:
    """What the template shows of one run."""
    environment, config = run.environment, run.config
    words = [
        f"{config.get('preset', 'model')}, sync {config.get('sync', '?')}",
        f"{_ranks_of(run, counted(environment.get('world_size'), 'rank'))} "
        f"by {environment.get('launcher', '?')}",
        f"{environment.get('device', '?')}, torch {environment.get('torch', '?')}",
    ]
    if peak := environment.get("peak_tflops"):
        about = "about " if str(environment.get("peak_source")).startswith("estimate") else ""
        words.append(f"{about}{peak} TFLOP/s a device at best")
    figures = ((name, *value.partition(" since ")) for name, value in figures_of(run))
    return {
        "name": run.name,
        "words": words,
        "kind": "good" if run.exit.get("exit_code") == 0 else "bad" if run.exit else "",
        "outcome": run.outcome,
        "figures": [(name, value, since + step) for name, value, since, step in figures],
        "events": events,
        "checks": _checks(run),
        "problems": run.problems,
        "warnings": _warnings(run),
        "numbers": _numbers(run),
        # Most settings have no value in most runs.
        "settings": [(k, str(value)) for k, value in config.items() if value not in (None, "")],
        "environment": [
            (k, shlex.join(map(str, value)) if isinstance(value, list) else str(value))
            for k, value in environment.items()
        ],
    }


# -- charts ---------------------------------------------------------------------------------------


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All charts of the page; several runs are lines in each, with their events in their colour."""
    alone = len(runs) == 1
    events = _numbered(runs)

    def lines(metric: str, name: str = "", *, by: float = 1.0) -> list[Line]:
        return [
            Line(
                name=name if alone else run.name,
                points=[(x, by * y) for x, y in run.metrics.get(metric, [])],
                color=k,
            )
            for k, run in enumerate(runs)
        ]

    def beside(line: Line, name: str) -> Line:
        """Drawn beside its run's other line in the same chart."""
        if alone:
            return replace(line, name=name, color=1)
        return replace(line, name=f"{line.name}, {name}", dashed=True)

    held_out = [replace(beside(ln, "validation"), marks=alone) for ln in lines("val/loss")]
    hidden = [replace(ln, points=_share(r)) for ln, r in zip(lines(""), runs, strict=True)]
    memory = lines("mem/max_reserved_gib", "measured")
    memory += [
        replace(beside(line, "planned"), points=run.planned_memory, dashed=True)
        for line, run in zip(memory, runs, strict=True)
        if run.planned_memory and line.points
    ]
    found = [
        Chart(
            title="Loss", y="nats per token", lines=[*lines("train/loss", "training"), *held_out]
        ),
        _from_zero("Tokens a second", "of all ranks", lines("perf/tokens_per_s")),
        *(
            replace(_step_parts(run, "" if alone else f", {run.name}"), events=its)
            for run, its in zip(runs[:_IN_DETAIL], events, strict=False)
        ),
        _from_zero("Exposed communication", "% of a step, not hidden behind computing", hidden),
        _from_zero("Learning rate", "", lines("optim/lr")),
        _from_zero("Norm of the mean gradient", "before clipping", lines("optim/grad_norm")),
        _from_zero("Memory", "GiB, rank 0 at its peak", memory),
        _from_zero(
            "Model FLOPs utilisation",
            "% of the device's peak in bf16",
            lines("perf/mfu", by=100.0),
        ),
    ]
    every = list(chain(*events))
    return [
        ch if ch.stacked else replace(ch, lines=[*_told_apart(ch.lines)], events=every)
        for ch in found
    ]


def _numbered(runs: Sequence[Run]) -> list[list[Event]]:
    """The events of each run; with several, numbered in sequence and in the run's colour."""
    numbers = count(1)
    return [
        [event._replace(number=next(numbers), color=k) for event in run.events]
        if len(runs) > 1
        else run.events
        for k, run in enumerate(runs)
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


def _step_parts(run: Run, behind: str) -> Chart:
    """Parts of a step's time, by the intervals between logged steps."""
    whole, *parts = (dict(run.metrics.get(name, [])) for name in ("perf/step_s", *_PARTS))
    # Split models log neither forward nor backward.
    timed = [
        (x, [whole[x], *(part.get(x, 0.0) for part in parts)]) for x in whole if x in parts[-1]
    ]
    known = [(x, values) for x, values in timed if all(map(math.isfinite, values))]
    lines = [
        Line(name=name, points=[(x, 1e3 * values[k]) for x, values in known], color=color)
        for k, ((name, color), part) in enumerate(zip(_PARTS.values(), parts, strict=True), 1)
        if part
    ]
    rest = [(x, 1e3 * max(0.0, step_s - sum(values))) for x, (step_s, *values) in known]
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


def _checks(run: Run) -> list[str]:
    """A sentence for each kind of comparison between the ranks' bits."""
    found = []
    for metric, (name, when) in CHECKS.items():
        if points := run.metrics.get(metric):
            unequal = [f"{step:g}" for step, equal in points if not equal]
            bits = f"different bits {when} {', '.join(unequal)}" if unequal else "equal bits"
            times = "once" if len(points) == 1 else f"{len(points)} times, last"
            found.append(f"{name.capitalize()} {times} {when} {points[-1][0]:g}: {bits}")
    return found


def _compared(runs: Sequence[Run]) -> Table:
    """The runs' figures: a column for each run, which also fits a phone."""
    columns = [{"ended": run.outcome} | dict(figures_of(run)) for run in runs]
    for run, column in zip(runs, columns, strict=True):
        load, cores = (run.environment.get(name) for name in ("load_at_start", "cores"))
        if isinstance(load, int | float) and isinstance(cores, int) and busy(load, cores):
            column["at the start"] = busy(load, cores)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return ("", *(run.name for run in runs)), rows


def _ranks_of(run: Run, last: str = "") -> str:
    last = last or str(run.environment.get("world_size", "not known"))
    return ", then ".join([*(f"{n:g}" for n in run.ranks[:-1]), last])


def _same_bits(runs: Sequence[Run]) -> list[list[str]]:
    """The groups of runs that ended with equal weights."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if isinstance(digest := run.summary.get("weights_sha256"), str):
            groups.setdefault(digest, []).append(f"{run.name} (ranks: {_ranks_of(run)})")
    return [names for names in groups.values() if len(names) > 1]


_OF_A_START = ("out", "nproc_per_node", "resume")
"""Settings that do not affect the computation."""
_PATHS = ("data", "tokenizer", "init")


def _differences(runs: Sequence[Run]) -> Table:
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
    return ("", *(run.name for run in runs)), rows


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


def _warnings(run: Run) -> list[str]:
    """The last warnings and errors of all ranks' logs, without tracebacks and without the error
    that the page shows as the run's outcome."""
    error, found = str(run.exit.get("error", "")), []
    for path in sorted((run.path / "logs").glob("rank_*.log")):
        rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
        for line in path.read_text("utf-8", errors="replace").splitlines():
            traceback = line.startswith(
                ("  ", "Traceback (", "During handling", "The above exception")
            )
            told = line.partition(": ")[2]
            repeated = not line[:1].isdigit() and told and told in error
            if not (" INFO " in line or traceback or repeated):
                found.append(f"[{rank}] {line}")
    return found[-_MOST_LINES:]


def _numbers(run: Run) -> Table:
    names = [name for name in run.metrics if name not in CHECKS]
    steps = sorted({x for name in names for x, _ in run.metrics[name]})
    shown = steps[:-1][:: -(-len(steps) // _MOST_ROWS) or 1] + steps[-1:]
    values = {name: dict(points) for name, points in run.metrics.items()}
    rows = [
        (f"{step:.0f}", *(f"{values[n][step]:.6g}" if step in values[n] else "" for n in names))
        for step in shown
    ]
    return ("step", *names), rows
