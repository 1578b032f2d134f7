"""`gradsync watch`: follow a running run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.report.watch import Follower, follow
from gradsync.errors import ConfigError
from gradsync.runtime.arguments import parse

_LOOK_S = 1.0
_START_LOOKS, _END_LOOKS = 60, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """Follow a run in the terminal by the files of its directory: steps, loss, speed, time left,
    checkpoints, warnings; one line each if the output is no terminal. It ends when the run does,
    with the run's exit code; Ctrl-C ends only the watching.
    """

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Run directory."""


def run(argv: list[str]) -> int:
    """Run `gradsync watch ARGV`; returns the exit code.

    Raises:
        ConfigError: no run directory is named, or the path is not one.
    """
    options = parse(WatchOptions, argv, "watch")
    if not options.path:
        raise ConfigError("watch: name a run directory: gradsync watch runs/first")
    try:
        return follow(_begun(Path(options.path)), sys.stdout, lambda: time.sleep(_LOOK_S))
    except KeyboardInterrupt:
        print("no longer watching; the run goes on", flush=True)
        return 130


def _begun(path: Path) -> Follower:
    """A run that exists; a starting run, or one that restarts after its end, takes some seconds."""
    for look in range(_START_LOOKS):
        ended = (path / "exit.json").exists() and look < _END_LOOKS
        if not ended and (path / "metrics.jsonl").exists():
            break
        if look == 0:
            print(f"waiting for a run to begin in {path}", flush=True)
        time.sleep(_LOOK_S)
    return Follower(path)
