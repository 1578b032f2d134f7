"""`gradsync report`: a page about one run or several."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gradsync.core.files import counted, write_result
from gradsync.errors import ConfigError
from gradsync.report.charts import standing_alone, svg
from gradsync.report.page import charts_of, figures_of, page
from gradsync.report.run import read_runs, read_verified
from gradsync.report.timeline import timeline_svg
from gradsync.runtime.arguments import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Write one HTML page about one or several runs: losses, speed, how each step's time is spent,
    memory, settings. It needs no network and no script, and can be printed.
    """

    paths: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …")] = field(
        default_factory=list
    )
    """Run directories."""
    out: str = ""
    """File, or for svg a folder. Default: report.html or charts (replaced) in the run's directory,
    for several runs in the first one's."""
    format: Literal["html", "svg"] = "html"
    """html: the page. svg: one file for each chart."""
    verify: str = ""
    """Output of `gradsync verify --json` to show as a table; default: verify.json in the first
    run's directory, if present."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the figures as one JSON document, and write nothing."""


def run(argv: list[str]) -> int:
    """Run `gradsync report ARGV`; returns the exit code.

    Raises:
        ConfigError: no run directory is named, or a path is not one.
    """
    options = parse(ReportOptions, argv, "report")
    if not options.paths:
        raise ConfigError("report: name a run directory: gradsync report runs/first")
    runs = read_runs([Path(path) for path in options.paths])
    if options.as_json:
        print(json.dumps({str(each.path): dict(figures_of(each)) for each in runs}))
        return 0
    verified = read_verified(runs[0].path, options.verify)
    told = len(runs) > 1 and not options.out
    where = ", in the first run's directory (--out names another place)" if told else ""
    if options.format == "html":
        out = Path(options.out) if options.out else runs[0].path / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(out, page(runs, verified))
        print(f"written to {out}{where}")
        return 0
    out = Path(options.out) if options.out else runs[0].path / "charts"
    out.mkdir(parents=True, exist_ok=True)
    for older in () if options.out else out.glob("*.svg"):
        older.unlink()
    drawn = {
        chart.title: standing_alone(d, chart) for chart in charts_of(runs) if (d := svg(chart))
    }
    for each in runs:
        title = f"Timeline of {each.name}" if len(runs) > 1 else "Timeline"
        if steps := timeline_svg(each.path, title):
            drawn[title] = steps
    taken = Counter[str]()
    for title, text in drawn.items():
        name = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")[:60]
        taken[name] += 1
        name += f"-{taken[name]}" * (taken[name] > 1)
        write_result(out / f"{name}.svg", text)
    print(f"{counted(len(drawn), 'chart')} in {out}{where}")
    return 0
