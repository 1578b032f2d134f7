"""The worker thread: order, errors, bits, its end, and life beside the main thread."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from gradsync.comm.process_group import Background
from gradsync.errors import RunError
from gradsync.runtime.gloo_group import finish_sending

NAME = "gradsync-background"


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def end(background: Background) -> None:
    background.close()
    background.close()
    assert not workers()


def test_strictly_in_order_on_one_thread() -> None:
    background = Background()
    assert not workers(), "started on first use"
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    works = [background.submit(lambda: gate.wait(10) and None)]
    works += [
        background.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(100)
    ]
    assert seen == []
    gate.set()
    works[-1].wait()
    assert [i for i, _ in seen] == list(range(100))
    assert {thread for _, thread in seen} == {workers()[0].ident}
    assert workers()[0].daemon
    for work in works:
        work.wait()
        work.wait()
    end(background)


def test_an_error_comes_out_of_wait_and_ends_all_that_follows() -> None:
    background = Background()
    ran: list[int] = []
    gate = threading.Event()

    def fail() -> None:
        gate.wait(10)
        raise ValueError("no such bucket")

    before = background.submit(lambda: ran.append(1))
    failing = background.submit(fail)
    queued = background.submit(lambda: ran.append(2))
    gate.set()
    before.wait()
    with pytest.raises(ValueError, match="no such bucket") as caught:
        failing.wait()
    late = background.submit(lambda: ran.append(3))
    for work in (queued, late, failing):
        with pytest.raises(ValueError, match="no such bucket") as again:
            work.wait()
        assert again.value is caught.value
    assert ran == [1]
    assert "fail" in [entry.name for entry in caught.traceback], "where it happened"
    end(background)


def test_close_finishes_what_was_submitted() -> None:
    background = Background()
    ran: list[int] = []
    for i in range(10):
        background.submit(lambda i=i: ran.append(i))
    end(background)
    assert ran == list(range(10))
    with pytest.raises(RunError, match="closed"):
        background.submit(lambda: None)
    end(Background())  # never used


@pytest.mark.parametrize("failed", [False, True])
def test_the_thread_ends_with_its_owner(failed: bool) -> None:
    """Also when jobs hold the owner, and when an error's traceback does."""

    class Owner:
        def __init__(self) -> None:
            self.background = Background()
            self.count = 0

        def job(self) -> None:
            self.count += 1
            if failed:
                raise ValueError("lost")

    owner = Owner()
    work = owner.background.submit(owner.job)
    if failed:
        with pytest.raises(ValueError, match="lost"):
            work.wait()
    else:
        work.wait()
    thread = workers()
    del owner, work
    gc.collect()
    for one in thread:
        one.join(5)
    assert not workers()


def test_what_a_job_held_is_let_go() -> None:
    """Gradients of the last step must not live until the next one."""

    class Held:
        pass

    background = Background()
    held = Held()
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    work = background.submit(lambda held=held: None)
    work.wait()
    del held
    assert gone.is_set()
    end(background)


def test_the_worker_takes_over_the_number_of_intra_op_threads() -> None:
    """Set after the worker's first operation, when torch itself would carry nothing over."""
    background = Background()
    before = torch.get_num_threads()
    seen: list[tuple[int, torch.Tensor]] = []
    data = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))

    def look() -> None:
        seen.append((torch.get_num_threads(), data.sum()))

    expected = []
    try:
        for count in (before, 3, 1, 2):
            torch.set_num_threads(count)
            expected.append((count, data.sum()))
            background.submit(look).wait()
    finally:
        torch.set_num_threads(before)
    assert seen == expected
    end(background)


def test_a_thread_that_waits_for_a_lost_rank_is_left_behind() -> None:
    """Gloo may never wake it; neither the new group nor the end of the session waits for it."""
    never, lost = threading.Event(), threading.Event()
    background = Background(lost=lost.is_set)
    background.submit(lambda: never.wait() and None)
    lost.set()
    background.close()
    finish_sending()
    never.set()
