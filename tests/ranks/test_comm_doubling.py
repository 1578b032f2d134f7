"""Recursive doubling: right for any number of ranks, and the same bits on all of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.p2p_collectives import doubling_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.comm_cases import (
    OPS,
    check_algorithm,
    rank_input,
)
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_any_length_dtype_and_op(world_size: int) -> None:
    check_algorithm(world_size, doubling_all_reduce)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_signed_zeros_are_alike_on_all_ranks(world_size: int) -> None:
    """0.0 and -0.0 are equal, and whichever wins must win everywhere."""

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, list[float]]:
        signs = {}
        for op in OPS:
            tensor = torch.tensor([0.0 if rank % 2 else -0.0, -0.0 if rank % 2 else 0.0])
            doubling_all_reduce(ProcessGroupCommunicator(group), tensor, op)
            signs[op] = [math.copysign(1.0, value) for value in tensor.tolist()]
        return signs

    results = run_thread_ranks(work, world_size)
    assert results == [results[0]] * world_size


def test_the_tree_of_four() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = rank_input(rank, 1000, torch.float32)
        doubling_all_reduce(ProcessGroupCommunicator(group), tensor)
        return tensor

    a, b, c, d = (rank_input(rank, 1000, torch.float32) for rank in range(4))
    for result in run_thread_ranks(work, 4):
        assert torch.equal(result, (a + b) + (c + d))
