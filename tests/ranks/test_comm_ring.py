"""The ring: right for any number of ranks, length, dtype and piece; the same bits everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.p2p_collectives import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.comm_cases import (
    check_algorithm,
    check_all,
    rank_input,
)
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_any_length_dtype_and_op(world_size: int) -> None:
    check_algorithm(world_size, partial(ring_all_reduce, chunk_bytes=4096))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_pieces_change_no_bits(world_size: int) -> None:
    """From one element a piece to one piece a share; also where shares differ by one element."""
    sizes = [4, 8, 20, 64, 1 << 20]

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for chunk_bytes in sizes:
            tensor = rank_input(rank, 10 * world_size + 1, torch.float32)
            comm = ProcessGroupCommunicator(group)
            ring_all_reduce(comm, tensor, "sum", chunk_bytes=chunk_bytes)
            results.append(tensor)
        return results

    by_rank = run_thread_ranks(work, world_size)
    check_all([results[0] for results in by_rank], "sum")
    for results in by_rank:
        for result in results:
            assert torch.equal(result, by_rank[0][0])


def test_the_order_is_the_documented_one() -> None:
    """Share r is x[r+1] + x[r+2] + ... + x[r], from the left."""

    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = rank_input(rank, 4, torch.float32)
        ring_all_reduce(ProcessGroupCommunicator(group), tensor)
        return tensor

    inputs = [rank_input(rank, 4, torch.float32) for rank in range(4)]
    for result in run_thread_ranks(work, 4):
        for owner in range(4):
            total = inputs[(owner + 1) % 4][owner]
            for i in range(2, 5):
                total = total + inputs[(owner + i) % 4][owner]
            assert result[owner] == total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_two_halves(world_size: int) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        comm = ProcessGroupCommunicator(group) if world_size > 1 else SingleCommunicator()
        tensor = rank_input(rank, 103, torch.int64)
        mine = ring_reduce_scatter(comm, tensor)
        shards = tensor.tensor_split(world_size)
        assert mine.data_ptr() == shards[rank].data_ptr()
        assert len(mine) == len(shards[rank])
        for other in range(world_size):
            if other != rank:
                shards[other].fill_(-1)  # scratch by contract
        ring_all_gather(comm, tensor)
        return tensor

    check_all(run_thread_ranks(work, world_size), "sum")


def test_shape_stays_and_autograd_stays_out() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = torch.full((2, 3, 4), rank + 1.0, requires_grad=True)
        ring_all_reduce(ProcessGroupCommunicator(group), tensor)
        assert tensor.requires_grad
        assert tensor.is_leaf
        return tensor.detach()

    for result in run_thread_ranks(work, 2):
        assert torch.equal(result, torch.full((2, 3, 4), 3.0))


def test_not_contiguous_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="strides"):
        ring_all_reduce(SingleCommunicator(), torch.zeros(3, 4).t())
