"""A rank's activity, by its stack, and what one rank can read of another."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.runtime import activity
from gradsync.runtime.activity import (
    Activity,
    Sampler,
    expect_wait,
    is_excused,
    place_of,
    read_activity,
    waiting_frame,
)
from gradsync.runtime.stacks import Frame, read_stack
from gradsync.runtime.store import record_of

PACKAGE = Path(activity.__file__).parents[1]
TORCH = str(Path(torch.__file__).parent)


def function(name: str, file: str, module: str) -> Callable[..., Any]:
    """A function that calls another one, as if it were written in that file."""
    code = f"def {name}(inner, *rest):\n    return inner(*rest)\n"
    names: dict[str, Any] = {"__name__": module}
    exec(compile(code, file, "exec"), names)  # noqa: S102
    return names[name]


USER = function("loop", "/home/me/train.py", "__main__")
HOOK = function("my_hook", "/home/me/hooks.py", "hooks")
STEP = function("step", f"{PACKAGE}/sync/gradient_sync.py", "gradsync.sync.gradient_sync")
SEND = function("all_reduce", f"{PACKAGE}/comm/tree.py", "gradsync.comm.tree")
CORE = function("backend_of", f"{PACKAGE}/core/torch_private.py", "gradsync.core.torch_private")
SCRIPT = function("script", "/usr/local/bin/gradsync", "__main__")
MAIN = function("main", f"{PACKAGE}/commands/cli/main.py", "gradsync.commands.cli.main")
LOOP = function("_train_step", f"{PACKAGE}/commands/train/loop.py", "gradsync.commands.train.loop")
SAVE = function("write", f"{PACKAGE}/checkpoint/store.py", "gradsync.checkpoint.store")
C10D = function("barrier", f"{TORCH}/distributed/distributed_c10d.py", "torch.distributed.c10d")
ELSEWHERE = "/opt/modules/lib/python3.12/dist-packages/torch/distributed/distributed_c10d.py"
OTHER_C10D = function("barrier", ELSEWHERE, "torch.distributed.c10d")
WRAPPER = function(
    "wrapper", f"{TORCH}/distributed/c10d_logger.py", "torch.distributed.c10d_logger"
)
OPS = function("__call__", f"{TORCH}/_ops.py", "torch._ops")
BACKWARD = function("backward", f"{TORCH}/_tensor.py", "torch._tensor")
ADAM = function("adam", f"{TORCH}/optim/adam.py", "torch.optim.adam")
THREADS = function("wait", threading.__file__, "threading")
TORCH_SAVE = function("save", f"{TORCH}/serialization.py", "torch.serialization")


def here() -> list[Frame]:
    """The caller's frames."""
    found = read_stack(threading.get_ident())
    return found[[each.code for each in found].index(here.__code__) + 1 :]


def stack(*calls: Callable[..., Any]) -> list[Frame]:
    """The frames inside of the `calls`, outermost first, and of what surrounds them."""
    found: list[list[Frame]] = []
    first, *rest = (*calls, lambda: found.append(here()[1:]))
    first(*rest)
    return found[0]


@pytest.mark.parametrize(
    ("calls", "waits"),
    [
        ([USER, STEP, SEND], "step"),
        ([USER, STEP, SEND, CORE], "step"),
        ([USER, WRAPPER, C10D], "wrapper"),
        ([USER, C10D, OPS], "barrier"),
        ([USER, OTHER_C10D], "barrier"),
        ([USER, SEND, THREADS], "all_reduce"),
        ([USER, BACKWARD, STEP, SEND], "step"),  # in a hook of ours
        ([USER], None),
        ([USER, THREADS], None),
        ([USER, BACKWARD], None),
        ([USER, OPS], None),
        ([USER, STEP, ADAM], None),
        ([USER, STEP, BACKWARD], None),
        ([USER, STEP, HOOK], None),
        ([LOOP, SAVE], None),
    ],
)
def test_who_waits(calls: list[Callable[..., Any]], waits: str | None) -> None:
    found = waiting_frame(stack(*calls))
    assert (found and found.code.co_name) == waits
    assert waiting_frame([]) is None


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([USER], "/home/me/train.py:2 loop"),
        ([USER, STEP, SEND], "/home/me/train.py:2 loop (step)"),
        ([USER, WRAPPER, C10D], "/home/me/train.py:2 loop (barrier)"),
        ([USER, OTHER_C10D], "/home/me/train.py:2 loop (barrier)"),
        ([USER, STEP, HOOK], "/home/me/hooks.py:2 my_hook"),
        ([SCRIPT, MAIN, LOOP, STEP, SEND], "gradsync/commands/train/loop.py:2 _train_step (step)"),
        ([SCRIPT, MAIN, LOOP, SAVE], "gradsync/checkpoint/store.py:2 write"),
    ],
)
def test_the_place_is_the_users_else_ours(calls: list[Callable[..., Any]], place: str) -> None:
    assert place_of(stack(*calls)) == place


def test_paths_are_short_even_without_a_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = stack(function("read", str(tmp_path / "data.py"), "data"))
    assert place_of(frame) == "data.py:2 read"
    tmp_path.rmdir()
    assert place_of(frame) == f"{tmp_path}/data.py:2 read"
    tmp_path.mkdir()
    long = place_of(stack(function("f", "/x" * 5_000, "y")))
    assert len(long) == 300


def test_who_may_be_waited_for() -> None:
    assert is_excused(stack(LOOP, SAVE, THREADS))
    assert is_excused(stack(USER, TORCH_SAVE))
    assert not is_excused(stack(USER, STEP))

    @expect_wait
    def evaluate(rows: int) -> tuple[int, bool]:
        """Words."""
        return rows, is_excused(here())

    assert evaluate(3) == (3, True)
    assert evaluate.__doc__ == "Words."
    assert not is_excused(here())


# -- a thread -------------------------------------------------------------------------------------


@contextmanager
def thread_in(call: Callable[[threading.Event], object]) -> Iterator[tuple[Sampler, Any]]:
    """A thread that makes `call` until the block ends."""
    end, made, started = threading.Event(), [], threading.Event()

    def run() -> None:
        made.append(Sampler(threading.get_ident(), lambda: issued[0]))
        started.set()
        call(end)

    issued = [3]
    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield made[0], issued
    finally:
        end.set()
        thread.join()


def test_a_wait_lasts_as_long_as_its_call() -> None:
    second = threading.Event()

    def two_calls(end: threading.Event) -> None:
        C10D(THREADS, second.wait)
        C10D(THREADS, end.wait)

    with thread_in(two_calls) as (sampler, _):
        try:
            time.sleep(0.05)
            first = sampler.sample(1)
            time.sleep(0.1)
            assert sampler.sample(2).since_s >= first.since_s + 0.09
            assert first.waits
        finally:
            second.set()
        for number in range(3, 100):  # until the thread has come to its second call
            time.sleep(0.05)
            found = sampler.sample(number)
            if found.since_s == 0.0:
                break
        assert (found.waits, found.since_s) == (True, 0.0)


def test_a_thread_without_work_is_idle_until_it_begins_another_collective() -> None:
    with thread_in(lambda end: end.wait()) as (sampler, issued):
        time.sleep(0.05)
        sampler.sample(1)
        time.sleep(0.1)
        found = sampler.sample(2)
        assert (found.idle, found.waits, found.issued) == (True, False, 3)
        assert found.since_s >= 0.09
        issued[0] = 4
        assert sampler.sample(3).since_s == 0.0


def test_a_thread_that_computes_is_not_idle() -> None:
    def spin(end: threading.Event) -> None:
        while not end.is_set():
            pass

    with thread_in(spin) as (sampler, _):
        until = time.monotonic() + 20.0
        sampler.sample(1)
        time.sleep(0.1)
        while sampler.sample(2).idle:  # a busy machine may not let it run
            assert time.monotonic() < until
            time.sleep(0.1)


def test_after_an_error_the_last_look_stays() -> None:
    with thread_in(lambda end: C10D(THREADS, end.wait)) as (sampler, _):
        until = time.monotonic() + 20.0
        while not (last := sampler.sample(1)).waits:
            assert time.monotonic() < until
        sampler.held = True
    assert sampler.sample(2) == replace(last, beat=2), "also where its thread has gone on"


class Seconds(float):
    """A number that can be referred to weakly."""


def test_what_a_call_holds_goes_with_it_though_it_was_sampled() -> None:
    gone: list[weakref.ref[Seconds]] = []
    ready, over = threading.Event(), threading.Event()

    def calls(end: threading.Event) -> None:
        gone.append(weakref.ref(timeout := Seconds(20.0)))
        rest = [timeout]
        del timeout
        C10D(THREADS, over.wait, rest.pop())
        ready.set()
        end.wait()

    with thread_in(calls) as (sampler, _):
        until = time.monotonic() + 20.0
        while waiting_frame(read_stack(sampler.thread)) is None:
            assert time.monotonic() < until
        assert [sampler.sample(beat).waits for beat in range(3)] == [True] * 3
        over.set()
        ready.wait()
        assert gone[0]() is None


# -- records --------------------------------------------------------------------------------------

SOUND = Activity(beat=3, waits=True, idle=True, issued=4, since_s=1.5, where="a.py:1 f (g)")


def test_a_record_comes_back_as_it_was() -> None:
    assert read_activity(record_of(SOUND)) == SOUND
    for record in (b"", b"[1]", b"{", b'{"beat": 1, "later": 2}', b"\xff"):
        assert read_activity(record).beat == -1
    steering = Activity(beat=1, where="\x1b[2J")
    assert read_activity(record_of(steering)).where == r"\x1b[2J"
