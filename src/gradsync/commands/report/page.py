"""One HTML page about a run, from the template `page.html.j2`."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from importlib import resources
from typing import Any

from gradsync.commands.report.charts import LIGHT, STYLE, Chart, Line, figure, timeline
from gradsync.commands.report.run import REPLICAS_EQUAL, WARNING, Run
from gradsync.core.files import counted
from gradsync.runtime.machine import busy

_MOST_LINES = 40
"""The most log lines to show."""


def page(run: Run) -> str:
    """The whole document."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("gradsync.commands.report").joinpath("page.html.j2")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    told, config = run.environment, run.config
    ranks = [f"{number:g}" for number in run.ranks[:-1]]
    last = counted(told.get("world_size"), "rank")
    words = [
        f"{config.get('preset', 'model')}, sync {config.get('sync', '?')}",
        f"{', then '.join([*ranks, last])} by {told.get('launcher', '?')}",
        f"{told.get('device', '?')}, torch {told.get('torch', '?')}",
    ]
    return environment.from_string(source.read_text("utf-8")).render(
        light=LIGHT,
        chart_style=STYLE,
        name=run.path.name,
        words=words,
        kind="good" if run.exit.get("exit_code") == 0 else "bad" if run.exit else "",
        outcome=run.outcome,
        figures=[*figures_of(run), *_load(run)],
        events=run.events,
        check=_check(run),
        charts="".join(map(figure, charts_of(run))),
        timeline=timeline(run.path),
        problems=run.problems,
        warnings=_warnings(run),
        # Most settings have no value in most runs.
        settings=[(k, str(value)) for k, value in config.items() if value not in (None, "")],
        environment=[
            (k, shlex.join(map(str, value)) if isinstance(value, list) else str(value))
            for k, value in told.items()
        ],
    )


def _load(run: Run) -> list[tuple[str, str]]:
    """A row if other programs used the machine when the run began: times are theirs too."""
    load, cores = (run.environment.get(name) for name in ("load_at_start", "cores"))
    known = isinstance(load, int | float) and isinstance(cores, int)
    return [("at the start", said)] if known and (said := busy(load, cores)) else []


# -- charts ---------------------------------------------------------------------------------------


def charts_of(run: Run) -> list[Chart]:
    """All charts of the page, with the run's events."""

    def line(metric: str, name: str = "", *, by: float = 1.0, **look: Any) -> Line:
        points = [(x, by * y) for x, y in run.metrics.get(metric, [])]
        return Line(name=name, points=points, **look)

    held_out = line("val/loss", "validation", color=1, marks=True)
    loss = [line("train/loss", "training"), held_out]
    found = [
        Chart(title="Loss", y="nats per token", lines=loss, from_zero=False),
        Chart(title="Tokens a second", y="of all ranks", lines=[line("perf/tokens_per_s")]),
        _step_parts(run),
        Chart(title="Learning rate", lines=[line("optim/lr")]),
        Chart(
            title="Norm of the mean gradient", y="before clipping", lines=[line("optim/grad_norm")]
        ),
        Chart(title="Memory", y="GiB, rank 0 at its peak", lines=[line("mem/max_reserved_gib")]),
        Chart(
            title="Model FLOPs utilisation",
            y="% of the device's peak in bf16",
            lines=[line("perf/mfu", by=100.0)],
        ),
    ]
    return [replace(chart, events=run.events) for chart in found]


_PARTS = {
    "perf/forward_s": ("forward", 0),
    "perf/backward_s": ("backward", 5),
    "perf/update_s": ("update", 3),
    "comm/exposed_s": ("exposed communication", 1),
    "perf/data_s": ("waiting for data", 4),
}
"""Metrics of a step's parts: their names, and indices of their colours."""


def _step_parts(run: Run) -> Chart:
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
    return Chart(title="Where a step's time went", y="ms", lines=lines, stacked=True)


# -- words ----------------------------------------------------------------------------------------


def figures_of(run: Run) -> list[tuple[str, str]]:
    """The figures at the top: words and value."""
    summary = run.summary
    found = [
        ("validation loss", summary.get("val_loss", run.last("val/loss"))),
        ("training loss", summary.get("final_train_loss", run.last("train/loss"))),
        ("steps", summary.get("steps", run.last_step)),
        ("tokens/s, all ranks", summary.get("tokens_per_s", run.last("perf/tokens_per_s"))),
    ]
    shown = [(name, _shown(value)) for name, value in found if isinstance(value, int | float)]
    fraction = summary.get("exposed_comm_fraction")
    if isinstance(fraction, int | float) and math.isfinite(fraction):
        shown.append(("exposed communication", f"{100 * fraction:.1f} %"))
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


def _warnings(run: Run) -> list[str]:
    """The last warnings and errors of all ranks' logs."""
    found = []
    for path in sorted((run.path / "logs").glob("rank_*.log")):
        rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
        lines = path.read_text("utf-8", errors="replace").splitlines()
        found += [f"[{rank}] {line}" for line in lines if WARNING.search(line)]
    return found[-_MOST_LINES:]
