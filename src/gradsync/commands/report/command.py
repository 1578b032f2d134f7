"""`gradsync report`: a page about one run or several."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.report.page import figures_of, page
from gradsync.commands.report.run import read_runs
from gradsync.core.files import write_result
from gradsync.errors import ConfigError


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
    """File. Default: report.html in the run's directory, for several runs in the first one's."""
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
    told = len(runs) > 1 and not options.out
    where = ", in the first run's directory (--out names another place)" if told else ""
    out = Path(options.out) if options.out else runs[0].path / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_result(out, page(runs))
    print(f"written to {out}{where}")
    return 0
