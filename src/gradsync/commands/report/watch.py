"""A live run, read from its directory: changes since the last look, as lines or as a panel.

Nothing is sent to the run: rank 0 writes what each rank is doing to `ranks.json` every second.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradsync.commands.arguments import parse
from gradsync.commands.report.run import RANKS_HEAD, WARNING, read_ranks, read_run
from gradsync.core.files import counted, lock, one_line, open_regular, read_object
from gradsync.errors import ConfigError

_OLD_WARNINGS = 5
"""The most warnings from before the first look to show."""
_LOOK_S = 1.0
_START_LOOKS = 60
_RESUME_LOOKS = 5
"""Looks at a run that has ended already: one that resumes it takes seconds to begin."""


class _Tail:
    """Complete lines of a growing file, which may be replaced or missing at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self.modified = 0.0

    def lines(self) -> list[str]:
        """Lines since the last call; all lines if the file was replaced."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                self.modified = found.st_mtime
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()

    def objects(self) -> Iterator[dict[str, Any]]:
        """The `lines` that are JSON objects with a step."""
        for line in self.lines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield entry


class Follower:
    """Looks at one run directory again and again; ConfigError if it is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_settings()
        self._metrics, self._starts = _Tail(path / "metrics.jsonl"), _Tail(path / "starts.jsonl")
        self._logs: dict[Path, _Tail] = {}
        self._told, self._checkpoint = 0, 0
        self._record: dict[str, Any] = {}
        self._held_out: dict[str, Any] = {}
        self._looked = False
        self.ended: Mapping[str, Any] = {}  # `exit.json`, once it exists

    def _read_settings(self) -> None:
        run = read_run(self._path)
        self._steps, self._ranks = run.config.get("steps"), run.environment.get("world_size", "?")

    def news(self) -> list[str]:
        """Changes since the last look, a line each; the first look reports only the newest."""
        # First: a run writes its end after everything else.
        before = self.ended
        self.ended = {} if self._holds() else read_object(self._path / "exit.json")
        found = [*self._restarts(), *self._records(), *self._new_checkpoint(), *self._warnings()]
        self._looked = True
        if self.ended and not before:
            found.append(f"the run has ended: {read_run(self._path).outcome}")
        return found

    def _holds(self) -> bool:
        """Whether a run holds its directory: an old exit.json is then the previous run's."""
        with suppress(OSError), open_regular(self._path / "starts.jsonl") as file:
            return not lock(file)
        return False

    def _restarts(self) -> Iterator[str]:
        for start in self._starts.objects():
            if self._looked:
                self._read_settings()
                self._told = start["step"]
                yield f"started again from step {self._told} with {counted(self._ranks, 'rank')}"

    def _records(self) -> list[str]:
        found = []
        for entry in self._metrics.objects():
            # After a restart, a new file repeats records that were already reported.
            if "val/loss" in entry and entry["step"] >= self._told and entry != self._held_out:
                self._held_out = entry
            elif "train/loss" in entry and entry["step"] > self._told:
                self._record, self._told = entry, entry["step"]
            else:
                continue
            found.append(self._words(entry))
        if self._looked:
            return found
        return [self._words(entry) for entry in (self._record, self._held_out) if entry]

    def _words(self, entry: Mapping[str, Any]) -> str:
        if "val/loss" in entry:
            return f"step {entry['step']}: validation loss {_figure(entry['val/loss'])}"
        rate = self._number("perf/tokens_per_s")
        parts = [
            f"step {entry['step']}" + (f"/{self._steps}" if self._steps else ""),
            f"loss {_figure(entry.get('train/loss'))}",
            f"{rate:,.0f} tok/s in all" if rate is not None else "",
            f"eta {left}" if (left := self._left()) else "",
        ]
        return "  ".join(filter(None, parts))

    def _number(self, name: str) -> float | None:
        value = self._record.get(name)
        return value if isinstance(value, int | float) else None

    def _left(self) -> str:
        """Time for the remaining steps, without evaluation and saving."""
        step_s = self._number("perf/step_s")
        if step_s is None or not isinstance(self._steps, int):
            return ""
        return _duration(max(0, self._steps - self._record["step"]) * step_s)

    def _new_checkpoint(self) -> Iterator[str]:
        # A checkpoint's directory appears complete or not at all.
        names = (path.name for path in self._path.glob("checkpoints/step-*"))
        steps = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))]
        newest = max(steps, default=0)
        if newest != self._checkpoint:
            self._checkpoint = newest
            yield f"checkpoint of step {newest}"

    def _warnings(self) -> list[str]:
        found = []
        for path in sorted(self._path.glob("logs/rank_*.log")):
            rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
            lines = self._logs.setdefault(path, _Tail(path)).lines()
            found += [f"rank {rank}: {one_line(line)}" for line in lines if WARNING.search(line)]
        return found if self._looked else found[-_OLD_WARNINGS:]

    def panel(self) -> Group:
        """A row for each rank, for a terminal, and the age of the last record."""
        age_s = max(0.0, time.time() - self._metrics.modified)
        found = read_ranks(self._path)
        ranks = Table(*(RANKS_HEAD if found.rows else ()), box=None, padding=(0, 2, 0, 0))
        for row in found.rows:
            ranks.add_row(*map(Text, row), style="" if found.fresh else "dim")
        return Group(ranks, Text(f"last record {_duration(age_s)} ago", style="dim"))


def follow(follower: Follower, stream: TextIO, pause: Callable[[], None]) -> int:
    """Report on the run until it ends; returns its exit code. A run that has ended before the first
    look may be about to be resumed, so a few more looks follow.

    Args:
        follower: of the run.
        stream: a terminal gets a panel below the lines.
        pause: called between two looks.
    """
    console = Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        began = False
        for look in itertools.count():
            for line in follower.news():
                console.print(line)
            began = began or not follower.ended
            if live is not None:
                live.update(follower.panel(), refresh=True)
            else:
                stream.flush()
            if follower.ended and (began or look == _RESUME_LOOKS):
                break
            pause()
    code = follower.ended.get("exit_code")
    return code if isinstance(code, int) else 1


def _figure(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "?"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


# -- the command --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """Follow a run in the terminal by the files of its directory: steps, loss, speed, time left,
    checkpoints, warnings; one line each if the output is no terminal. It ends when the run does,
    with the run's exit code; Ctrl-C ends only the watching.
    """

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Run directory."""


def run(argv: list[str]) -> int:
    """Run `gradsync watch ARGV`; returns the exit code."""
    options = parse(WatchOptions, argv, "watch")
    if not options.path:
        raise ConfigError("watch: name a run directory: gradsync watch runs/first")
    path = Path(options.path)
    try:
        for look in range(_START_LOOKS):  # a starting run takes some seconds
            if (path / "metrics.jsonl").exists():
                break
            if look == 0:
                print(f"waiting for a run to begin in {path}", flush=True)
            time.sleep(_LOOK_S)
        return follow(Follower(path), sys.stdout, lambda: time.sleep(_LOOK_S))
    except KeyboardInterrupt:
        print("no longer watching; the run goes on", flush=True)
        return 130
