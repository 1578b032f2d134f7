"""What a rank's main thread is doing: in a collective, or in which line of the user's program.

A rank's watch thread samples the stack of the main thread at each heartbeat and publishes the
result with it. So a rank that waits can say whom it waits for and where that rank is, and the
training loop pays nothing. From the innermost frame outwards, the first of these decides:

    torch.distributed, gradsync.comm, gradsync.sync    it waits for other ranks
    the rest of torch, the user's program              it is busy

A rank whose Python lock is held publishes nothing. On the same host another rank asks its process
for the stack by a signal (`StackOnSignal`), which the interpreter answers without the lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from gradsync.core.files import one_line

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_WAITS = tuple(_PACKAGE + name + os.sep for name in ("comm", "sync", "backends"))
_LIBRARIES = tuple({sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONGEST = 300  # characters of a place
_RECORD_LIMIT = 4_096  # bytes
_ANSWER_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a rank was doing at its last heartbeat."""

    beat: int
    """Number of the heartbeat; one that stands still means that the rank is stopped or has gone."""
    waits: bool = False
    """Whether it is in a collective or a message."""
    since_s: float = 0.0
    """Seconds for which it has waited in this call, or been out of any collective."""
    where: str = ""
    """`FILE:LINE FUNCTION` of the user's program; "" when unknown."""
    call: str = ""
    """Name of the function of torch or gradsync in which it waits."""

    def record(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))


def read_activity(record: bytes) -> Activity:
    """What a rank published, with control characters taken out; beat -1 when it is unreadable."""
    with suppress(ValueError, TypeError, RecursionError):
        found = Activity(**json.loads(record)) if len(record) <= _RECORD_LIMIT else None
        if (
            found is not None
            and (type(found.beat), type(found.waits)) == (int, bool)
            and type(found.since_s) in (int, float)
            and isinstance(found.where, str)
            and isinstance(found.call, str)
        ):
            return Activity(
                beat=found.beat,
                waits=found.waits,
                since_s=float(found.since_s),
                where=one_line(found.where),
                call=one_line(found.call),
            )
    return Activity(beat=-1)


class Sampler:
    """Samples what one thread of this process is doing.

    Args:
        thread: its identifier (`threading.get_ident`).
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._held: FrameType | None = None
        """The frame that waits: held so that a later call cannot be taken for the same one."""
        self._since = time.monotonic()

    def sample(self, beat: int) -> Activity:
        """Look at the thread once, for heartbeat number `beat`."""
        frame = sys._current_frames().get(self._thread)
        waiting = waiting_frame(frame)
        if waiting is not self._held or waiting is None:
            if waiting is not None or self._held is not None:
                self._since = time.monotonic()
            self._held = waiting
        return Activity(
            beat=beat,
            waits=waiting is not None,
            since_s=round(time.monotonic() - self._since, 2),
            where=place_of(frame),
            call="" if waiting is None else waiting.f_code.co_name,
        )

    def stack(self) -> str:
        """The thread's stack as text, innermost frame last."""
        frame = sys._current_frames().get(self._thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def waiting_frame(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the call in which `frame`'s thread waits for other ranks; None when it
    is busy with something else."""
    while frame is not None and _is_library(frame) and not _communicates(frame):
        if _is_torch(frame):
            return None  # it computes, even if a step called it
        frame = frame.f_back
    if frame is None or not _communicates(frame):
        return None
    while frame.f_back is not None and _communicates(frame.f_back):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType | None) -> str:
    """`FILE:LINE FUNCTION` of the innermost frame of the user's program; else of gradsync's, else
    of any."""
    ours = first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            ours = ours or _said(frame)
        elif not _is_library(frame) and not file.startswith("<frozen"):
            return _said(frame)
        first = first or _said(frame)
        frame = frame.f_back
    return ours or first or ""


def _said(frame: FrameType) -> str:
    file, here = frame.f_code.co_filename, os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{frame.f_lineno} {frame.f_code.co_name}"[-_LONGEST:]


def _communicates(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename.startswith(_WAITS) or module.startswith("torch.distributed")


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _is_library(frame: FrameType) -> bool:
    """Whether the frame is of Python, an installed package or an extension; gradsync is none."""
    file = frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, "<frozen")) and not file.startswith(_PACKAGE)


class StackOnSignal:
    """Lets other processes of the same user ask this one for its main thread's stack.

    The answer goes into memory that they find as file `fd` of this process: nothing is on a disk.
    It comes from the interpreter's signal handler, so a held Python lock does not stop it. Nothing
    happens where the signal is used already, or the system has no memory files.
    """

    def __init__(self) -> None:
        self.fd = -1
        number = _signal()
        if number and signal.getsignal(number) is signal.SIG_DFL:
            self.fd = os.memfd_create("gradsync-stack")
            faulthandler.register(number, file=self.fd, all_threads=False)

    def close(self) -> None:
        """Answer no more."""
        if self.fd >= 0:
            faulthandler.unregister(_signal())
            os.close(self.fd)
            self.fd = -1


def ask_for_stack(pid: int, fd: int) -> str:
    """`FILE:LINE FUNCTION` of the innermost frame of process `pid`, which answers in its file `fd`;
    "" when it does not answer within half a second."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    with suppress(OSError):
        before = path.stat().st_size
        os.kill(pid, _signal())
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            time.sleep(0.02)
            text = path.read_bytes()[before:].decode(errors="replace")
            if found := re.search(r'File "([^"\n]*)", line (\d+) in (\S+)', text):
                return one_line(f"{found[1]}:{found[2]} {found[3]}")
    return ""


def _signal() -> int:
    """The signal that asks; 0 where there is none."""
    return signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") and hasattr(os, "memfd_create") else 0
