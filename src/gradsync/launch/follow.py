"""Follow a submitted job: its states and its log, until it has ended for good."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from gradsync.errors import RunError
from gradsync.launch.slurm import JobState, states_of

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


def follow(
    job: str,
    log: Path | None,
    *,
    out: TextIO,
    err: TextIO | None = None,
    states: Callable[[str], list[JobState]] = states_of,
    pause: Callable[[float], None] = time.sleep,
) -> list[JobState]:
    """Print changes of state to `err` and what is new in the log to `out`; returns the last states.

    Asks Slurm every half second at first, and ever more rarely, down to every ten seconds, while
    nothing changes.

    Args:
        job: id of a job or an array.
        log: its log, None for an array (each task has its own).
        states: what Slurm says, for tests.
        pause: waits so many seconds, for tests.

    Raises:
        RunError: Slurm has forgotten the job.
    """
    err = err or sys.stderr
    told: dict[str, str] = {}
    offset, pause_s = 0, _FIRST_PAUSE_S
    while True:
        now = states(job)
        if not now:
            raise RunError(f"Slurm has forgotten job {job}; the log may tell how it ended")
        changed = False
        before = offset
        offset = copy_new(log, offset, out)
        for each in now:
            text = each.describe()
            if told.get(each.job) != text:
                told[each.job], changed = text, True
                print(f"gradsync: job {each.job} {text}", file=err, flush=True)
        if all(each.ended for each in now):
            copy_new(log, offset, out)
            return now
        quiet = not changed and offset == before
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S) if quiet else _FIRST_PAUSE_S
        pause(pause_s)


def copy_new(log: Path | None, offset: int, out: TextIO) -> int:
    """Copy what the file `log` holds beyond `offset` bytes to `out`; returns the new offset."""
    if log is None:
        return offset
    try:
        with log.open("rb") as file:
            file.seek(offset)
            new = file.read()
    except OSError:  # not there yet
        return offset
    if new:
        out.write(new.decode("utf-8", errors="replace"))
        out.flush()
    return offset + len(new)
