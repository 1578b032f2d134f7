"""Ranks as threads: collectives work, a failing rank ends the others, a hang shows every stack."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(world_size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> float:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value, group=group)
        return value.item() + 100 * rank

    total = sum(range(1, world_size + 1))
    assert run_thread_ranks(body, world_size) == [total + 100 * r for r in range(world_size)]


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


def test_an_early_finisher_does_not_disturb_the_others() -> None:
    done_early = threading.Event()

    def body(rank: int, group: dist.ProcessGroup) -> float:
        if rank == 2:
            done_early.set()
            return 0.0
        done_early.wait()
        tensor = torch.tensor([float(rank)])
        if rank == 0:
            group.recv([tensor], 1, 0).wait()
        else:
            group.send([tensor], 0, 0).wait()
        return tensor.item()

    assert run_thread_ranks(body, 3) == [1.0, 1.0, 0.0]


def test_a_hang_fails_with_the_stacks() -> None:
    release = threading.Event()

    def body_that_hangs(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 1:
            release.wait()

    with pytest.raises(pytest.fail.Exception, match=r"rank1.*not done") as caught:
        run_thread_ranks(body_that_hangs, 2, timeout_s=0.3)
    release.set()
    assert "body_that_hangs" in str(caught.value)
