"""One HTML page about one run or several, from the template `page.html.j2`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from gradsync.commands.report.charts import LIGHT, STYLE, Chart, Line, figure, timeline
from gradsync.commands.report.run import REPLICAS_EQUAL, WARNING, Run
from gradsync.core.files import counted

_MOST_LINES = 40
"""The most log lines to show."""
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
        runs=list(map(_told, runs)),
        same_bits=_same_bits(runs),
        compared=_compared(runs),
        charts="".join(map(figure, charts_of(runs))),
        timelines="".join(drawn),
        differences=_differences(runs),
    )


def _told(run: Run) -> dict[str, Any]:
    """What the template shows of one run."""
    environment, config = run.environment, run.config
    words = [
        f"{config.get('preset', 'model')}, sync {config.get('sync', '?')}",
        f"{_ranks_of(run, counted(environment.get('world_size'), 'rank'))} "
        f"by {environment.get('launcher', '?')}",
        f"{environment.get('device', '?')}, torch {environment.get('torch', '?')}",
    ]
    return {
        "name": run.name,
        "words": words,
        "kind": "good" if run.exit.get("exit_code") == 0 else "bad" if run.exit else "",
        "outcome": run.outcome,
        "figures": figures_of(run),
        "events": run.events,
        "check": _check(run),
        "problems": run.problems,
        "warnings": _warnings(run),
        # Most settings have no value in most runs.
        "settings": [(k, str(value)) for k, value in config.items() if value not in (None, "")],
        "environment": [
            (k, shlex.join(map(str, value)) if isinstance(value, list) else str(value))
            for k, value in environment.items()
        ],
    }


# -- charts ---------------------------------------------------------------------------------------


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All charts of the page: one run with its events, or several runs as lines in each chart."""
    alone = len(runs) == 1
    events = runs[0].events if alone else []

    def lines(metric: str, name: str = "", *, by: float = 1.0) -> list[Line]:
        return [
            Line(
                name=name if alone else run.name,
                points=[(x, by * y) for x, y in run.metrics.get(metric, [])],
                color=k,
            )
            for k, run in enumerate(runs)
        ]

    held_out = [
        replace(line, name="validation", color=1, marks=True)
        if alone
        else replace(line, name=f"{line.name}, validation", dashed=True)
        for line in lines("val/loss")
    ]
    loss = [*lines("train/loss", "training"), *held_out]
    found = [
        Chart(title="Loss", y="nats per token", lines=loss, from_zero=False),
        Chart(title="Tokens a second", y="of all ranks", lines=lines("perf/tokens_per_s")),
        *(_step_parts(run, "" if alone else f", {run.name}") for run in runs[:_IN_DETAIL]),
        Chart(title="Learning rate", lines=lines("optim/lr")),
        Chart(
            title="Norm of the mean gradient", y="before clipping", lines=lines("optim/grad_norm")
        ),
        Chart(title="Memory", y="GiB, rank 0 at its peak", lines=lines("mem/max_reserved_gib")),
        Chart(
            title="Model FLOPs utilisation",
            y="% of the device's peak in bf16",
            lines=lines("perf/mfu", by=100.0),
        ),
    ]
    return [replace(chart, events=events) for chart in found]


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
    lines.append(Line(name="the rest", points=rest, color=2))
    return Chart(title=f"Where a step's time went{behind}", y="ms", lines=lines, stacked=True)


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
    if (mfu := run.last("perf/mfu")) is not None:
        shown.append(("MFU at the last step", f"{100 * mfu:.1f} %"))
    if memory := run.metrics.get("mem/max_reserved_gib"):
        shown.append(("GiB, peak of rank 0", _shown(max(value for _, value in memory))))
    if isinstance(summary.get("weights_sha256"), str):
        shown.append(("SHA-256 of the weights", f"{summary['weights_sha256'][:8]}…"))
    return shown


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4f}"


def _check(run: Run) -> str:
    """A sentence about the comparisons between the replicas' bits; "" without any."""
    if not (points := run.metrics.get(REPLICAS_EQUAL)):
        return ""
    unequal = [f"{step:g}" for step, equal in points if not equal]
    bits = f"different bits after step {', '.join(unequal)}" if unequal else "equal bits"
    return f"Replicas compared {counted(len(points), 'time')}: {bits}"


def _compared(runs: Sequence[Run]) -> Table:
    """The runs' figures: a column for each run, which also fits a phone."""
    columns = [{"ended": run.outcome} | dict(figures_of(run)) for run in runs]
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


def _differences(runs: Sequence[Run]) -> Table:
    """Settings in which the runs differ."""
    rows = [("ranks", *map(_ranks_of, runs))]
    for name in dict.fromkeys(name for run in runs for name in run.config):
        if name not in _OF_A_START:
            values = (run.config.get(name) for run in runs)
            rows.append((name, *("default" if v in ("", None) else str(v) for v in values)))
    return ("", *(run.name for run in runs)), [row for row in rows if len({*row[1:]}) > 1]


def _warnings(run: Run) -> list[str]:
    """The last warnings and errors of all ranks' logs."""
    found = []
    for path in sorted((run.path / "logs").glob("rank_*.log")):
        rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
        lines = path.read_text("utf-8", errors="replace").splitlines()
        found += [f"[{rank}] {line}" for line in lines if WARNING.search(line)]
    return found[-_MOST_LINES:]
