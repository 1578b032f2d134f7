"""Another thread's stack, read while nothing else runs."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from gradsync.runtime import stacks
from gradsync.runtime.stacks import mark_call, read_stack, running_threads, stack_lines


def outer(inner: Callable[..., Any], *rest: Any) -> Any:
    return inner(*rest)


@contextmanager
def thread_in(*calls: Callable[..., Any]) -> Iterator[int]:
    """The identifier of a thread that is in these calls, outermost first, until the block ends."""
    started, end = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        end.wait()

    thread = threading.Thread(target=outer, args=(*calls, wait))
    thread.start()
    started.wait()
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        end.set()
        thread.join()


def read_plainly(thread: int) -> Iterator[FrameType]:
    """The readable twin; safe only where that thread stands still."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_it_is_what_frame_objects_say() -> None:
    with thread_in(outer, outer) as thread:
        plain = list(read_plainly(thread))
        found = read_stack(thread)
        assert [each[:3] for each in found] == [
            (frame.f_code, frame.f_lineno, frame.f_globals) for frame in plain
        ]
        assert sum(each.code is outer.__code__ for each in found) == 3
        assert {each.module for each in found} == {__name__, "threading"}
        assert stack_lines(found) == traceback.format_stack(plain[0])
        assert {thread, threading.get_ident()} <= set(running_threads())
    assert read_stack(thread) == []


def test_a_mark_stays_as_long_as_the_call() -> None:
    with thread_in(outer) as thread:
        assert all(each.unseen for each in read_stack(thread))
        mark_call(thread, outer.__code__)
        assert {each.code.co_name for each in read_stack(thread) if not each.unseen} == {"outer"}
    with thread_in(outer) as thread:
        assert all(each.unseen for each in read_stack(thread))


def test_nothing_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may let another thread go on, while Python has the address of its call.

    It is asked whether the collector is off. To let one collect meanwhile can stop Python 3.11 for
    good: it holds a lock that a thread takes when it begins or ends.
    """
    current_frames, enable, states = sys._current_frames, gc.enable, []

    def begin() -> dict[int, FrameType]:
        states.append(gc.isenabled())
        return current_frames()

    def end() -> None:
        states.append(gc.isenabled())
        enable()

    monkeypatch.setattr(sys, "_current_frames", begin)
    monkeypatch.setattr(gc, "enable", end)
    with thread_in(*[outer] * 50) as thread:
        assert len(read_stack(thread)) > 50
    assert states == [False, False]
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[int, FrameType]:
        assert not gc.isenabled()
        raise MemoryError

    gc.disable()
    try:
        assert read_stack(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()
    monkeypatch.setattr(stacks.sys, "_current_frames", fail)
    with pytest.raises(MemoryError):
        read_stack(threading.get_ident())
    assert gc.isenabled()
