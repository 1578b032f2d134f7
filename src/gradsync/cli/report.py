"""`gradsync report`: a page about one run or several."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gradsync.cli.arguments import parse
from gradsync.core.files import write_text
from gradsync.errors import ConfigError
from gradsync.report.charts import standing_alone, svg
from gradsync.report.page import charts_of, figures_of, page
from gradsync.report.run import read_run
from gradsync.report.timeline import timeline_svg


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Write one HTML page about a run, or several side by side: losses, speed, where each step's
    time went, memory, settings. It needs no network and no script, and prints.

    gradsync report runs/first runs/second --out compared.html
    """

    paths: Annotated[list[str], tyro.conf.Positional] = field(default_factory=list)
    """Run directories."""
    out: str = ""
    """File, or with --format svg a folder; default: report.html in the first run's directory."""
    format: Literal["html", "svg"] = "html"
    """html: the page. svg: one file for each chart."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the figures as one JSON document, and write nothing."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync report ARGV`; returns the exit code.

    Raises:
        ConfigError: no run directory is named, or one is none.
    """
    options = parse(ReportOptions, argv, "report", pairs=False)
    if not options.paths:
        raise ConfigError("report: name a run directory: gradsync report runs/first")
    runs = [read_run(Path(path)) for path in options.paths]
    if options.as_json:
        print(json.dumps({str(each.path): dict(figures_of(each)) for each in runs}))
        return 0
    out = Path(options.out) if options.out else runs[0].path / "report.html"
    if options.format == "html":
        write_text(out, page(runs))
        print(f"written to {out}")
        return 0
    out = Path(options.out or "charts")
    out.mkdir(parents=True, exist_ok=True)
    drawn = {chart.title: svg(chart) for chart in charts_of(runs)}
    drawn["Timeline"] = timeline_svg(runs[0].path)
    for title, text in drawn.items():
        if text:
            name = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")
            write_text(out / f"{name}.svg", standing_alone(text))
    print(f"{sum(map(bool, drawn.values()))} charts in {out}")
    return 0
