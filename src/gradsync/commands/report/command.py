"""`gradsync report`: a page about a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.report.page import figures_of, page
from gradsync.commands.report.run import read_run
from gradsync.core.files import write_result
from gradsync.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Write one HTML page about a run: losses, speed, how each step's time is spent, memory,
    settings. It needs no network and no script, and can be printed.
    """

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Run directory."""
    out: str = ""
    """File. Default: report.html in the run's directory."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the figures as one JSON document, and write nothing."""


def run(argv: list[str]) -> int:
    """Run `gradsync report ARGV`; returns the exit code.

    Raises:
        ConfigError: no run directory is named, or a path is not one.
    """
    options = parse(ReportOptions, argv, "report")
    if not options.path:
        raise ConfigError("report: name a run directory: gradsync report runs/first")
    found = read_run(Path(options.path))
    if options.as_json:
        print(json.dumps(dict(figures_of(found))))
        return 0
    out = Path(options.out) if options.out else found.path / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_result(out, page(found))
    print(f"written to {out}")
    return 0
