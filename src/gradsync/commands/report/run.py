"""A run directory as data for the report: metrics, outcome, environment, configuration."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.commands.document import read_document
from gradsync.commands.report.charts import Event
from gradsync.commands.train.config_io import flat
from gradsync.core.files import counted, one_line, open_regular, read_object
from gradsync.errors import ConfigError

Points = list[tuple[float, float]]
REPLICAS_EQUAL = "check/replicas_equal"
"""1 where the replicas' bits were equal."""
WARNING = re.compile(r"(^| )(WARNING|ERROR|CRITICAL) ")
"""In lines of the ranks' logs."""
_STOPPED = 75  # Exit code of a run that a signal stopped, with a checkpoint written


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
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Each start of the run, as `RunDir.begin` notes it."""
    incidents: list[Event] = field(default_factory=list)
    """Losses that the run went on after, and ranks that joined it."""
    problems: list[str] = field(default_factory=list)
    """Lines that could not be read, and missing files."""

    def last(self, metric: str) -> float | None:
        """The last value of a metric, None without one."""
        points = self.metrics.get(metric)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> float | None:
        """The last step that was logged, None without one."""
        logged = (points for name, points in self.metrics.items() if name != REPLICAS_EQUAL)
        return max((points[-1][0] for points in logged), default=None)

    @property
    def ranks(self) -> list[float]:
        """Numbers of ranks, in order, of the steps that count."""
        ends = [start["step"] for start in self.starts[1:]] + [math.inf]
        began = zip(self.starts, ends, strict=False)
        return [n for n, _ in groupby(s["world_size"] for s, end in began if end > s["step"])]

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.exit:
            return _ended(self.exit)
        return "running" if read_ranks(self.path).fresh else "still running, or killed"

    @property
    def events(self) -> list[Event]:
        """Points at which the run resumed or ended early, in order."""
        found = [*self.incidents]
        gone_on = {incident.step for incident in found}
        for before, start in pairwise(self.starts):
            if start["step"] in gone_on:  # another rank writes since then
                continue
            step, ended = start["step"], start.get("before") or {}
            reached = start.get("reached") or step
            words = f"after step {reached:g}: {_ended(ended) if ended else 'killed'}; went on from "
            words += f"step {step:g} with {counted(start['world_size'], 'rank')}"
            if before["world_size"] != start["world_size"]:
                words += f" in place of {before['world_size']:g}"
            found.append(Event(step, words, ended.get("exit_code") not in (0, _STOPPED)))
        code, last = self.exit.get("exit_code", 0), self.last_step
        if code != 0 and last is not None:
            words = f"after step {last:g}: {_ended({**self.exit, 'error': ''})}"  # it is `outcome`
            found.append(Event(last, words, code != _STOPPED))
        return sorted(found, key=lambda event: event.step)


def read_run(path: Path) -> Run:
    """Read the run directory `path`, complete or not.

    Raises:
        ConfigError: no run directory.
    """
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(f"{path}: no run directory (no metrics.jsonl in it)")
    problems: list[str] = []
    metrics: dict[str, Points] = {}
    for step, entry in _lines(path / "metrics.jsonl", ("step",), problems):
        for name, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metrics.setdefault(name, []).append((step, float(value)))
    starts = []
    if (path / "starts.jsonl").is_file():
        read = _lines(path / "starts.jsonl", ("step", "world_size"), problems)
        starts = [entry | {"step": step} for step, entry in read]
    incidents = []
    if (path / "incidents.jsonl").is_file():
        # Incidents that ended the run have no step, and are in exit.json.
        for step, entry in _lines(path / "incidents.jsonl", ("step", "seconds"), []):
            words = f"step {step:g}: {one_line(entry['said'])}, {entry['seconds']:.1f} s"
            incidents.append(Event(step, words))
    config = None
    try:
        config = read_document(path / "config.yaml", "configuration").values
    except ConfigError as error:
        problems.append(str(error))
    return Run(
        path=path.resolve(),
        metrics=metrics,
        summary=read_object(path / "summary.json"),
        exit=read_object(path / "exit.json"),
        environment=read_object(path / "env.json"),
        config=dict(flat(config)) if isinstance(config, dict) else {},
        starts=starts,
        incidents=incidents,
        problems=problems,
    )


RANKS_HEAD = ("rank", "step", "steps/s", "phase", "waited", "lag", "where")
_MOST_RANKS = 16
_OLD_S = 10.0


class RankRows(NamedTuple):
    """What each rank was doing when `ranks.json` was written."""

    rows: list[tuple[str, ...]]
    """Under `RANKS_HEAD`; with many ranks, the ones that others wait for longest."""
    fresh: bool
    """Whether the next one is not overdue."""


def read_ranks(run: Path) -> RankRows:
    """The run's table of ranks; no rows if it has none."""
    found = read_object(run / "ranks.json")
    if not found:
        return RankRows([], False)
    ranks = found["ranks"]
    if len(ranks) > _MOST_RANKS:
        # Silent ranks come first, then ranks that others wait for, then ranks that wait least.
        ranks.sort(key=lambda r: (r["phase"] != "silent", -r["lag_s"], r["waited"]))
    rows: list[tuple[str, ...]] = [
        (
            str(rank["rank"]),
            str(rank["step"]),
            "" if rank["steps_per_s"] is None else f"{rank['steps_per_s']:.2f}",
            rank["phase"],
            f"{100 * rank['waited']:.0f} %",
            f"{rank['lag_s']:.1f} s" if rank["lag_s"] else "",
            one_line(rank["where"]),
        )
        for rank in ranks[:_MOST_RANKS]
    ]
    if (more := len(ranks) - len(rows)) > 0:
        rows.append((f"and {more} more", *[""] * (len(RANKS_HEAD) - 1)))
    return RankRows(rows, time.time() - found["time"] <= max(_OLD_S, 3 * found["every_s"]))


def _ended(exit_file: Mapping[str, Any]) -> str:
    code, reason = exit_file.get("exit_code"), one_line(exit_file.get("reason", ""))
    if code in (0, _STOPPED):
        return reason
    error = one_line(str(exit_file.get("error", "")).partition("\n")[0])
    return f"exit code {code}: {reason}" + (f", {error}" if error else "")


def _lines(
    path: Path, numbers: Sequence[str], problems: list[str]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """(step, the rest) of each line that is an object with these `numbers`."""
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                entry |= {name: float(entry[name]) for name in numbers}
                step = entry.pop("step")
            except (ValueError, KeyError, TypeError):
                problems.append(
                    f"{path.name}, line {number}: not an object with a {' and '.join(numbers)}"
                )
            else:
                yield step, entry
