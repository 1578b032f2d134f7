"""Hand a freshly bound port to the other ranks of one host, through a private file.

The file lies in a directory only this user can enter, is keyed by the job (so that concurrent jobs
cannot meet), and names the process that wrote it: a reader ignores what a dead process left.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gradsync.errors import RendezvousError
from gradsync.runtime.store import wait_until


def publish_port(key: str, port: int) -> Path:
    """Write `port` where `read_port(key)` finds it; the caller removes the file once all joined."""
    path = _directory() / f"{key}.json"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(handle, "w") as file:
        json.dump({"port": port, "pid": os.getpid(), "started": _start_time(os.getpid())}, file)
    Path(temporary).replace(path)
    return path


def read_port(key: str, *, rank: int, deadline_s: float) -> int:
    """Wait for rank 0's port until `deadline_s` (monotonic clock, seconds).

    Raises:
        RendezvousError: rank 0 published nothing in time.
    """
    path = _directory() / f"{key}.json"
    found: list[int] = []

    def published() -> bool:
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            note = json.loads(path.read_text())
            if _start_time(note["pid"]) == note["started"] != "" and 0 < note["port"] < 65_536:
                found.append(int(note["port"]))
        return bool(found)

    started = time.monotonic()
    if not wait_until(published, deadline_s):
        raise RendezvousError(
            f"rank {rank} waited {time.monotonic() - started:.0f} s for rank 0 on this host to "
            f"publish its port in {path}; rank 0 did not start, or runs with another TMPDIR"
        )
    return found[0]


def _directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"gradsync-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RendezvousError(f"{path} must belong to this user with mode 0700; remove it")
    return path


def _start_time(pid: int) -> str:
    """When `pid` started, "" when there is no such process: tells a process from its successor."""
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""
