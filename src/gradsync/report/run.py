"""A run directory as the report needs it: metrics by name, outcome, environment, configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.core.files import one_line, open_regular, read_object
from gradsync.errors import ConfigError

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run."""

    path: Path
    metrics: Mapping[str, Points]
    """(step, value) of each metric, in the order of the file."""
    summary: Mapping[str, Any]
    exit: Mapping[str, Any]
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    """Lines that could not be read, and files that are missing."""

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.path.name

    def last(self, metric: str) -> float | None:
        """The last value of a metric, None without one."""
        points = self.metrics.get(metric)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> float | None:
        """The last step that was logged, None without one."""
        return max((points[-1][0] for points in self.metrics.values()), default=None)

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if not self.exit:
            return "still running, or killed"
        code, reason = self.exit.get("exit_code"), self.exit.get("reason", "")
        return one_line(reason) if code == 0 else f"exit code {code}: {one_line(reason)}"


def read_run(path: Path) -> Run:
    """Read the run directory `path`, as far as it came.

    Raises:
        ConfigError: no run directory.
    """
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(f"{path}: no run directory (no metrics.jsonl in it)")
    problems: list[str] = []
    metrics = _metrics(path / "metrics.jsonl", problems)
    found = {name: read_object(path / f"{name}.json") for name in ("summary", "exit", "env")}
    config = found["summary"].get("config") or _config(path / "config.yaml", problems)
    return Run(
        path=path.resolve(),
        metrics=metrics,
        summary=found["summary"],
        exit=found["exit"],
        environment=found["env"],
        config=flat(config),
        problems=problems,
    )


def flat(document: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A nested document with one dotted name for each value."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def _metrics(path: Path, problems: list[str]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                step = float(entry.pop("step"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                problems.append(f"metrics.jsonl, line {number}: not an object with a step")
                continue
            for name, value in entry.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found.setdefault(name, []).append((step, float(value)))
    return found


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        with open_regular(path) as file:
            document = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        problems.append(f"{path.name}: {one_line(error)}")
        return {}
    return document if isinstance(document, dict) else {}
