"""Find and end processes through /proc: by a mark in their environment, or by their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def marked(mark: str) -> list[int]:
    """Ids of all processes started with the environment entry `mark` ("NAME=value").

    The mark is inherited, so it finds what a parent, a group or a session id would lose: workers
    that torchrun puts into sessions of their own, and Slurm tasks, whose parent is a daemon.
    """
    entry = mark.encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and entry in _read(name, "environ"):
            found.append(int(name))
    return found


def children() -> set[int]:
    """Ids of this process's own children, dead but unwaited ones included."""
    ids: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        ids.update(map(int, _read(f"self/task/{task}", "children").split()))
    return ids


def leaves(pids: Iterable[int]) -> list[int]:
    """The `pids` that have no child among `pids`."""
    pids = list(pids)
    parents = {_parent(pid) for pid in pids}
    return [pid for pid in pids if pid not in parents]


def describe(pid: int) -> str:
    """`pid (command line)`, for a message."""
    words = _read(str(pid), "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return f"{pid} ({words[:150] or 'ended'})"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each of `pids` that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until_gone(mark: str, timeout_s: float) -> list[int]:
    """Wait for the processes with `mark` to end; returns those that did not."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def end_all(mark: str, timeout_s: float = 5.0) -> None:
    """Kill every process with `mark` and wait until none is left (new ones included)."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.02)


def _parent(pid: int) -> int:
    # The name in field 2 may hold spaces and parentheses; the parent is the second word after it.
    words = _read(str(pid), "stat").rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def _read(folder: str, name: str) -> bytes:
    try:
        return Path("/proc", folder, name).read_bytes()
    except OSError:  # it ended meanwhile, or belongs to another user
        return b""
