"""What a rank's main thread is doing: in a collective, or at which line of the program.

A rank's watch thread samples the stack of the main thread at each heartbeat and publishes the
result with it. So a waiting rank can name the rank it waits for and that rank's line. The training
loop pays nothing. From the innermost frame outwards, the first match decides:

    torch.distributed, gradsync.comm, gradsync.sync    it waits for other ranks
    the rest of torch, the user's program              it is busy

Python has no frame for waits in C++: torch's DDP in a backward, `work.wait()`. So a rank also
publishes whether its thread used the processor, and how many collectives it has begun. A rank that
is idle and has begun more than another rank waits for it (waiting.py).

A rank whose GIL is held publishes nothing. Another rank on the same host asks its process for the
stack by a signal (`StackOnSignal`), which the interpreter answers without the GIL.
"""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import ParamSpec, TypeVar

from gradsync.core.files import one_line
from gradsync.runtime.frames import PACKAGE, Frame, is_library, mark_call, read_stack, stack_lines

P = ParamSpec("P")
R = TypeVar("R")

_WAITS = tuple(PACKAGE + name + os.sep for name in ("comm", "sync"))
_SAVES = (PACKAGE + "checkpoint" + os.sep, os.sep + os.path.join("torch", "serialization.py"))
_COMMANDS = os.path.join(PACKAGE, "commands", "cli", "")
_LONGEST = 300  # characters of a place
_RECORD_LIMIT = 4_096  # bytes
_PASSES_ON = ("wrapper", "_run_code", "_GeneratorContextManager", "Module._")
"""Library functions that do not tell what the program calls through them."""
_ANSWER_S = 0.5
_FRAME = r'File "([^"\n]*)", line (\d+) in (\S+)'
_NAME = "gradsync-stack"
_DECLARED = "declared_wait"
_IDLE = 0.2
"""Largest share of a core that an idle thread uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """A rank's activity at its last heartbeat."""

    beat: int
    """Number of the heartbeat; it stands still when the rank is stopped or dead."""
    waits: bool = False
    """Whether its stack shows that it is in a collective or a message."""
    idle: bool = False
    """Whether its thread has used almost no processor time since the last heartbeat."""
    excused: bool = False
    """Whether it writes a checkpoint or runs a function declared by `expect_wait`."""
    issued: int = 0
    """Collectives that it has begun in the default process group."""
    since_s: float = 0.0
    """Seconds it has waited in this call, or has been idle since its last collective."""
    step: int = 0
    """Optimizer steps that it has done, if its program reports them."""
    where: str = ""
    """`FILE:LINE FUNCTION (CALL)` in the program, with the library call; "" when unknown."""

    def record(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))


def read_activity(record: bytes) -> Activity:
    """A rank's published activity without control characters; beat -1 when it is unreadable."""
    kinds = {field.name: type(getattr(_UNKNOWN, field.name)) for field in fields(Activity)}
    with suppress(ValueError, TypeError, RecursionError):
        found = json.loads(record) if len(record) <= _RECORD_LIMIT else None
        if isinstance(found, dict) and {n: type(value) for n, value in found.items()} == kinds:
            return replace(Activity(**found), where=one_line(found["where"]))
    return _UNKNOWN


_UNKNOWN = Activity(beat=-1)


class Sampler:
    """Samples what `thread` (its identifier) of this process is doing; `num_issued` says how many
    collectives this process has begun.

    Marks a waiting call, so that a later call is not taken for it.
    """

    def __init__(self, thread: int, num_issued: Callable[[], int] = lambda: 0) -> None:
        self._thread, self._num_issued = thread, num_issued
        self._step = 0
        self._last, self._held = _UNKNOWN, False
        self._waited = False
        self._idle_at = -1
        self._since = time.monotonic()
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if has_clock else None
        self._used = (time.monotonic(), 0.0)

    def sample(self, beat: int) -> Activity:
        """Look at the thread once, for heartbeat number `beat`."""
        frames = read_stack(self._thread)
        if self._held:  # checked after the look, which may be too late
            return replace(self._last, beat=beat)
        waiting, now, idle, issued = waiting_frame(frames), time.monotonic(), False, 0
        with suppress(RuntimeError):  # not every backend counts
            issued = self._num_issued()
        if self._clock is not None:
            (then, used), self._used = self._used, (now, time.clock_gettime(self._clock))
            idle = self._used[1] - used < _IDLE * (now - then)
        idle_at = issued if idle else -1
        if waiting is not None:
            again = not waiting.unseen
            mark_call(self._thread, waiting.code)
        else:
            again = not self._waited and idle_at == self._idle_at
        if not again:
            self._since = now
        self._waited, self._idle_at = waiting is not None, idle_at
        self._last = Activity(
            beat=beat,
            waits=waiting is not None,
            idle=idle,
            excused=is_excused(frames),
            issued=issued,
            since_s=round(now - self._since, 2),
            step=self._step,
            where=place_of(frames),
        )
        return self._last

    def hold(self) -> None:
        """Keep the last sample: an error leaves the place that other ranks should see."""
        self._held = True

    def tell(self, step: int) -> None:
        """Publish with the next heartbeat that this rank has done `step` steps."""
        self._step = step

    def stack(self) -> str:
        """The thread's stack as text, innermost frame last."""
        return "".join(stack_lines(read_stack(self._thread)))


def waiting_frame(frames: Sequence[Frame]) -> Frame | None:
    """The outermost frame of the call in which a thread with these frames, innermost first, waits
    for other ranks; None when it is busy with something else."""
    for number, frame in enumerate(frames):
        if _communicates(frame):
            return list(takewhile(_communicates, frames[number:]))[-1]
        file, module = frame.code.co_filename, frame.module
        computes = module.partition(".")[0] == "torch" and module != "torch._ops"  # any operator's
        if computes or not (is_library(file) or file.startswith(PACKAGE)):
            return None
    return None


def is_excused(frames: Sequence[Frame]) -> bool:
    """Whether a thread with these frames writes a checkpoint (ours or torch.save's) or runs a
    function declared by `expect_wait`."""
    return any(
        (each.code.co_filename == __file__ and each.code.co_name == _DECLARED)
        or each.code.co_filename.startswith(_SAVES[0])
        or each.code.co_filename.endswith(_SAVES[1])
        for each in frames
    )


def expect_wait(function: Callable[P, R]) -> Callable[P, R]:
    """Declare that other ranks may wait for `function`, up to `timeout_s`: an evaluation or a
    download by one rank. While it runs, the wait is not reported, and a stop signal waits for it to
    end.

        @gs.expect_wait
        def evaluate(model): ...

        if world.is_main:
            evaluate(model)
    """

    @functools.wraps(function)
    def declared_wait(*given: P.args, **named: P.kwargs) -> R:
        return function(*given, **named)

    return declared_wait


def place_of(frames: Sequence[Frame]) -> str:
    """`FILE:LINE FUNCTION (CALL)`: the innermost frame of the program and the library function it
    calls; without one, gradsync's innermost frame that does not communicate."""
    called, ours = "", ""
    for frame in frames:
        file = frame.code.co_filename
        if file.startswith(PACKAGE):
            if not _communicates(frame):
                ours = ours or _said(frame, called)
            if file.startswith(_COMMANDS):
                return ours  # its caller is the `gradsync` command itself
        elif not is_library(file):
            return _said(frame, called)
        name = frame.code.co_qualname
        if not name.startswith(_PASSES_ON) and "<" not in name:
            called = name
    return ours or (_said(frames[0], "") if frames else "")


def _said(frame: Frame, called: str) -> str:
    file = frame.code.co_filename
    if file.startswith(PACKAGE):
        file = os.path.join("gradsync", file.removeprefix(PACKAGE))
    else:
        with suppress(OSError):  # the folder may be gone
            file = file.removeprefix(os.getcwd() + os.sep)
    place = f"{file}:{frame.line} {frame.code.co_name}"[-_LONGEST:]
    return f"{place} ({called[:_LONGEST]})" if called else place


def _communicates(frame: Frame) -> bool:
    in_torch = frame.module.startswith("torch.distributed")
    return in_torch or frame.code.co_filename.startswith(_WAITS)


class StackOnSignal:
    """Lets other processes of the same user ask this one for its main thread's stack.

    The answer goes into memory, file `fd` of this process; nothing is on disk. The interpreter's
    signal handler writes it, so a held GIL does not stop it. Does nothing if the signal is already
    in use, or the system has no memory files.
    """

    def __init__(self) -> None:
        self.fd = -1
        number = _signal()
        if number and signal.getsignal(number) is signal.SIG_DFL:
            self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # It grows with each answer, and never shrinks under a reader.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            faulthandler.register(number, file=self.fd, all_threads=False)

    def close(self) -> None:
        """Stop answering."""
        if self.fd >= 0:
            faulthandler.unregister(_signal())
            os.close(self.fd)
            self.fd = -1


def ask_for_stack(pid: int, fd: int) -> str:
    """`FILE:LINE FUNCTION` of the program's innermost frame in process `pid`; see
    `ask_for_frames`."""
    frames = re.findall(_FRAME, ask_for_frames(pid, fd))
    own = [each for each in frames if not is_library(each[0])]
    for file, line, function in (own or frames)[:1]:
        return one_line(f"{file}:{line} {function}")
    return ""


def ask_for_frames(pid: int, fd: int) -> str:
    """The stack of the main thread of process `pid`, innermost frame first; "" when it does not
    answer within half a second. The process writes it to its file `fd`."""
    path, text = Path(f"/proc/{pid}/fd/{fd}"), b""
    with suppress(OSError):
        if _NAME not in str(path.readlink()):
            return ""  # without a handler, the signal would end it
        before = path.stat().st_size
        os.kill(pid, _signal())
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            time.sleep(0.02)
            seen, text = text, path.read_bytes()[before:]
            answer = text.decode("ascii", "replace")
            if text == seen and re.search(_FRAME, answer):
                return answer
    return ""


def _signal() -> int:
    """The signal that asks; 0 on systems without one."""
    return signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") and hasattr(os, "memfd_create") else 0
