"""Hand a freshly bound port to the other ranks of one host, through a private file.

Its name begins with the job's key, so that concurrent jobs cannot meet, and ends at random: in a
temporary directory that all users share, another one can neither take the name beforehand nor make
a file that belongs to this user, and readers look at no other. It names the process that wrote it:
a reader ignores what a dead process left.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gradsync.errors import RendezvousError
from gradsync.runtime.store import wait_until


def publish_port(key: str, port: int) -> Path:
    """Write `port` where `read_port(key)` finds it; the caller removes the file once all joined."""
    for left in _notes(key):  # by a dead process of this job
        with suppress(OSError):
            left.unlink()
    handle, path = tempfile.mkstemp(prefix=f"{key}-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump({"port": port, "pid": os.getpid(), "started": _start_time(os.getpid())}, file)
    return Path(path)


def read_port(key: str, *, rank: int, deadline_s: float) -> int:
    """Wait for rank 0's port until `deadline_s` (monotonic clock, seconds).

    Raises:
        RendezvousError: rank 0 published nothing in time.
    """
    found: list[int] = []

    def published() -> bool:
        for path in _notes(key):
            with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                note = json.loads(_own_text(path))
                if _start_time(note["pid"]) == note["started"] != "" and 0 < note["port"] < 65_536:
                    found.append(int(note["port"]))
        return bool(found)

    started = time.monotonic()
    if not wait_until(published, deadline_s):
        raise RendezvousError(
            f"rank {rank} waited {time.monotonic() - started:.0f} s for rank 0 on this host to "
            f"publish its port in {tempfile.gettempdir()}/{key}-*.json; rank 0 did not start, or "
            "runs with another TMPDIR or as another user"
        )
    return found[0]


def _notes(key: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{key}-*.json"))


def _own_text(path: Path) -> bytes:
    """Contents of a plain file of this user that no other may write.

    Raises:
        OSError: it is not such a file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if (
            status.st_uid != os.getuid()
            or status.st_mode & 0o022
            or not stat.S_ISREG(status.st_mode)
        ):
            raise OSError("not a private file")
        return os.read(file, 4096)
    finally:
        os.close(file)


def _start_time(pid: int) -> str:
    """When `pid` started, "" when there is no such process: tells a process from its successor."""
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""
