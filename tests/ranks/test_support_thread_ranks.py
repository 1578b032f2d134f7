"""Ranks as threads: collectives work, a failing rank ends the others, a hang shows every stack."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("late", [False, True])
def test_the_first_failure_is_raised_and_nobody_hangs(late: bool) -> None:
    """Whether the others are already waiting, or come to the collective later."""
    failed = threading.Event()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 1:
            failed.set()
            raise ValueError("rank 1 is out")
        if late:
            failed.wait()
        group.allreduce([torch.ones(1)]).wait()

    start_s = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 is out") as caught:
        run_thread_ranks(body, 3, timeout_s=20)
    assert time.monotonic() - start_s < 5
    assert "body" in [entry.name for entry in caught.traceback]


def test_a_hang_fails_with_the_stacks() -> None:
    release = threading.Event()

    def body_that_hangs(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 1:
            release.wait()

    with pytest.raises(pytest.fail.Exception, match=r"rank1.*not done") as caught:
        run_thread_ranks(body_that_hangs, 2, timeout_s=0.3)
    release.set()
    assert "body_that_hangs" in str(caught.value)
