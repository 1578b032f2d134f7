"""Recursive doubling: right for any number of ranks, and the same bits on all of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.doubling import doubling_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.single import SingleCommunicator
from support.comm_cases import FLOATS, INTEGERS, OPS, check_all, lengths, rank_input
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", range(1, 9))
def test_any_length_dtype_and_op(world_size: int) -> None:
    cases = [(n, torch.float32, op) for n in lengths(world_size) for op in OPS]
    cases += [(1000, dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in OPS]

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        comm = ProcessGroupCommunicator(group) if world_size > 1 else SingleCommunicator()
        results = []
        for length, dtype, op in cases:
            tensor = rank_input(rank, length, dtype)
            doubling_all_reduce(comm, tensor, op)
            results.append(tensor)
        return results

    by_rank = run_thread_ranks(work, world_size)
    for i, (_, _, op) in enumerate(cases):
        check_all([results[i] for results in by_rank], op)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
@pytest.mark.parametrize("op", OPS)
def test_signed_zeros_are_alike_on_all_ranks(world_size: int, op: str) -> None:
    """0.0 and -0.0 are equal, and whichever wins must win everywhere."""

    def work(rank: int, group: dist.ProcessGroup) -> list[float]:
        tensor = torch.tensor([0.0 if rank % 2 else -0.0, -0.0 if rank % 2 else 0.0])
        doubling_all_reduce(ProcessGroupCommunicator(group), tensor, op)
        return [math.copysign(1.0, value) for value in tensor.tolist()]

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
