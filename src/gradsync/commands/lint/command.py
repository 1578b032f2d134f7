"""`gradsync lint`: finds known mistakes in data-parallel training scripts without running them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.lint.rules import lint
from gradsync.commands.lint.script import Script
from gradsync.core.files import counted, printable
from gradsync.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LintOptions:
    """Find known mistakes in training scripts: no_sync around a part of a step, a sampler without
    set_epoch, cuda:RANK, collectives on one rank, and others. Nothing is imported or run.

    `# gradsync: ignore[GS204]` at the end of a line suppresses that rule there. Exit code 1: an
    error or a warning was found.
    """

    paths: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")] = field(
        default_factory=list
    )
    """Scripts, or folders of them."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document."""


def run(argv: list[str]) -> int:
    """Run `gradsync lint ARGV`; returns the exit code.

    Raises:
        ConfigError: no path, a missing path, or a file that is not Python.
    """
    options = parse(LintOptions, argv, "lint")
    if not options.paths:
        raise ConfigError("lint: name a script or a folder: gradsync lint train.py")
    paths = [path for name in options.paths for path in _scripts(Path(name))]
    found = [
        each
        for path in paths
        for each in lint(Script(str(path), path.read_text("utf-8", errors="replace")))
    ]
    if options.as_json:
        told = ("id", "level", "says", "why", "fix")
        entries = [
            {"path": each.path, "line": each.line}
            | {name: getattr(each.rule, name) for name in told}
            for each in found
        ]
        print(json.dumps({"files": len(paths), "found": entries}))
        return 1 if found else 0
    for each in found:
        rule = each.rule
        print(f"{printable(each.path)}:{each.line}: {rule.id} {rule.level}: {rule.says}")
        print(f"    why: {rule.why}\n    fix: {rule.fix}")
    said = counted(len(found), "mistake") if found else "nothing found"
    print(f"{counted(len(paths), 'file')}: {said}")
    return 1 if found else 0


def _scripts(path: Path) -> Iterator[Path]:
    if path.is_dir():
        hidden = (".", "__pycache__")
        yield from (
            each
            for each in sorted(path.rglob("*.py"))
            if not any(part.startswith(hidden) for part in each.relative_to(path).parts)
        )
    elif path.is_file():
        yield path
    else:
        raise ConfigError(f"lint: {path} is not there")
