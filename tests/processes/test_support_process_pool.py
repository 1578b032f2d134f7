"""The pool of worker processes: jobs, failures, leaks, deaths and hangs."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.process_pool import ProcessPool

FAILED = pytest.fail.Exception


def _with_group(rank: int, world_size: int, store_path: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )


def sum_ranks(rank: int, world_size: int, store_path: str, scale: float) -> Any:
    _with_group(rank, world_size, store_path)
    value = torch.tensor([rank * scale])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return {"sum": value, "pid": os.getpid(), "threads": torch.get_num_threads()}


def fail_on_rank_1(rank: int, world_size: int, store_path: str) -> None:
    print(f"hello from rank {rank}")
    _with_group(rank, world_size, store_path)
    try:
        if rank == 1:
            raise ValueError("no luck on rank 1")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def keep_the_group(rank: int, world_size: int, store_path: str) -> None:
    _with_group(rank, world_size, store_path)


def die(rank: int, world_size: int, store_path: str) -> None:
    os._exit(7)


def hang(rank: int, world_size: int, store_path: str) -> None:
    while True:
        time.sleep(0.1)


def test_results_come_in_rank_order(pool: ProcessPool) -> None:
    first = pool.run(sum_ranks, 2, 10.0)
    assert [answer["sum"].item() for answer in first] == [10.0, 10.0]
    assert [answer["threads"] for answer in first] == [1, 1]
    assert os.getpid() not in {answer["pid"] for answer in first}
    again = pool.run(sum_ranks, 2, 1.0)
    assert [a["pid"] for a in first] == [a["pid"] for a in again], "workers stay warm"


def test_an_exception_carries_its_traceback_and_output(pool: ProcessPool) -> None:
    with pytest.raises(FAILED, match="no luck on rank 1") as caught:
        pool.run(fail_on_rank_1, 2)
    text = str(caught.value)
    assert "--- rank 1: Traceback" in text
    assert "--- rank 0: Traceback" in text
    assert "in fail_on_rank_1" in text
    assert "hello from rank 0" in text


def test_a_group_left_open_fails(pool: ProcessPool) -> None:
    with pytest.raises(FAILED, match="default process group left initialised"):
        pool.run(keep_the_group, 1)
    assert pool.run(sum_ranks, 1, 1.0)[0]["sum"].item() == 0.0


def test_a_dead_worker_is_named_and_replaced(pool: ProcessPool) -> None:
    with pytest.raises(FAILED, match="rank 0: worker died, exit code 7"):
        pool.run(die, 1)
    assert pool.run(sum_ranks, 1, 1.0)[0]["sum"].item() == 0.0


def test_a_hang_shows_the_stacks(pool: ProcessPool) -> None:
    pool.run(sum_ranks, 1, 1.0)  # warm, so that the timeout below is the job's own
    with pytest.raises(FAILED, match="rank 0: stopped: not done after 1") as caught:
        pool.run(hang, 1, timeout_s=1.0)
    assert "in hang" in str(caught.value)
