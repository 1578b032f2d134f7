"""What a rank's main thread is doing: in a collective, or at which line of the program.

A rank's watch thread samples the stack of the main thread at each heartbeat and publishes the
result with it. So a waiting rank can name the rank it waits for and that rank's line. The training
loop pays nothing. From the innermost frame outwards, the first match decides:

    torch.distributed, gradsync.comm, gradsync.sync    it waits for other ranks
    the rest of torch, the user's program              it is busy

Python has no frame for waits in C++: torch's DDP in a backward, `work.wait()`. So a rank also
publishes whether its thread used the processor, and how many collectives it has begun. A rank that
is idle and has begun more than another rank waits for it (waiting.py).
A rank whose GIL is held publishes nothing: others tell its last place.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ParamSpec, TypeVar

from gradsync.core.files import one_line
from gradsync.runtime.stacks import PACKAGE, Frame, is_library, mark_call, read_stack

P = ParamSpec("P")
R = TypeVar("R")

_WAITS = tuple(PACKAGE + name + os.sep for name in ("comm", "sync"))
_SAVES = (PACKAGE + "checkpoint" + os.sep, os.sep + os.path.join("torch", "serialization.py"))
_COMMANDS = os.path.join(PACKAGE, "commands", "cli", "")
_LONGEST = 300  # characters of a place
_PASSES_ON = ("wrapper", "_run_code", "_GeneratorContextManager", "Module._")
"""Library functions that do not tell what the program calls through them."""
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


def read_activity(record: bytes) -> Activity:
    """A rank's published activity without control characters; beat -1 when it is unreadable."""
    try:
        found = Activity(**json.loads(record))
        return replace(found, where=one_line(found.where))
    except (ValueError, TypeError):
        return _UNKNOWN


_UNKNOWN = Activity(beat=-1)


class Sampler:
    """Samples what `thread` (its identifier) of this process is doing; `num_issued` says how many
    collectives this process has begun.

    Marks a waiting call, so that a later call is not taken for it.
    """

    def __init__(self, thread: int, num_issued: Callable[[], int] = lambda: 0) -> None:
        self.thread, self._num_issued = thread, num_issued
        self._step = 0
        self._last = _UNKNOWN
        self.held = False
        """Set to keep the last sample: an error leaves the place that other ranks should see."""
        self._idle_at = -1
        self._since = time.monotonic()
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if has_clock else None
        self._used = (time.monotonic(), 0.0)

    def sample(self, beat: int) -> Activity:
        """Look at the thread once, for heartbeat number `beat`."""
        frames = read_stack(self.thread)
        if self.held:  # checked after the look, which may be too late
            return replace(self._last, beat=beat)
        waiting, now, idle, issued = waiting_frame(frames), time.monotonic(), False, 0
        with suppress(RuntimeError):  # not every backend counts
            issued = self._num_issued()
        if self._clock is not None:
            (then, used), self._used = self._used, (now, time.clock_gettime(self._clock))
            idle = self._used[1] - used < _IDLE * (now - then)
        idle_at = issued if idle else -1
        again = not self._last.waits and idle_at == self._idle_at
        if waiting is not None:
            again = not waiting.unseen
            mark_call(self.thread, waiting.code)
        if not again:
            self._since = now
        self._idle_at = idle_at
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

    def tell(self, step: int) -> None:
        """Publish with the next heartbeat that this rank has done `step` steps."""
        self._step = step


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
