"""Collectives made of messages: right, the same bits everywhere, and as many bytes as the textbooks
say."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, Subset, levels_of
from gradsync.comm.p2p_collectives import (
    hierarchical_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.comm_cases import check_algorithm, check_all, rank_input
from support.host_layouts import LAYOUTS, placement
from support.recording import RecordingCommunicator
from support.thread_ranks import run_thread_ranks


def tree_all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any = "sum") -> None:
    tree_reduce(comm, tensor, op)
    tree_broadcast(comm, tensor)


ALGORITHMS = {"ring": partial(ring_all_reduce, chunk_bytes=4096), "tree": tree_all_reduce}
SIZES = (2, 3, 4, 6, 7, 8)
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (0, 1, 5, 1001)
LENGTH = 5 * 840  # 840 is divisible by 1..8


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_length_dtype_and_op(name: str, world_size: int) -> None:
    check_algorithm(world_size, ALGORITHMS[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leaders", [False, True])
def test_any_layout(layout: str, leaders: bool) -> None:
    places = placement(LAYOUTS[layout])

    def all_reduce(comm: Communicator, tensor: torch.Tensor, op: str) -> None:
        intra, inter, equal_nodes = levels_of(comm, places)
        equal_nodes = equal_nodes and not leaders
        hierarchical_all_reduce(intra, inter, tensor, op, equal_nodes=equal_nodes)

    check_algorithm(len(places.node_ranks), all_reduce)


def test_the_order_is_the_documented_one() -> None:
    """Share r of the ring is x[r+1] + x[r+2] + ... + x[r], from the left; the tree adds pairs."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ring, tree = (rank_input(rank, 4, torch.float32) for _ in range(2))
        ring_all_reduce(ProcessGroupCommunicator(group), ring)
        tree_all_reduce(ProcessGroupCommunicator(group), tree)
        return ring, tree

    inputs = [rank_input(rank, 4, torch.float32) for rank in range(4)]
    for ring, tree in run_thread_ranks(work, 4):
        assert torch.equal(tree, (inputs[0] + inputs[1]) + (inputs[2] + inputs[3]))
        for owner in range(4):
            total = inputs[(owner + 1) % 4][owner]
            for i in range(2, 5):
                total = total + inputs[(owner + i) % 4][owner]
            assert ring[owner] == total


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_pieces_change_no_bits(world_size: int) -> None:
    """From one element a piece to one piece a share; also where shares differ by one element."""

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for chunk_bytes in (4, 8, 20, 64, 1 << 20):
            tensor = rank_input(rank, 10 * world_size + 1, torch.float32)
            ring_all_reduce(ProcessGroupCommunicator(group), tensor, chunk_bytes=chunk_bytes)
            results.append(tensor)
        return results

    by_rank = run_thread_ranks(work, world_size)
    check_all([results[0] for results in by_rank], "sum")
    for results in by_rank:
        assert all(torch.equal(result, by_rank[0][0]) for result in results)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_halves_and_trees(world_size: int) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        comm = ProcessGroupCommunicator(group) if world_size > 1 else SingleCommunicator()
        halves, tree = (rank_input(rank, 103, torch.int64) for _ in range(2))
        mine = ring_reduce_scatter(comm, halves)
        shards = halves.tensor_split(world_size)
        assert mine.data_ptr() == shards[rank].data_ptr()
        assert len(mine) == len(shards[rank])
        for other in range(world_size):
            if other != rank:
                shards[other].fill_(-1)  # scratch by contract
        ring_all_gather(comm, halves)
        tree_reduce(comm, tree)
        if rank:
            tree.fill_(-1)
        tree_broadcast(comm, tree)
        return halves, tree

    for results in zip(*run_thread_ranks(work, world_size), strict=True):
        check_all(list(results), "sum")


def test_shape_stays_and_autograd_stays_out() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = torch.full((2, 3, 4), rank + 1.0, requires_grad=True)
        ring_all_reduce(ProcessGroupCommunicator(group), tensor)
        assert tensor.requires_grad
        assert tensor.is_leaf
        return tensor.detach()

    for result in run_thread_ranks(work, 2):
        assert torch.equal(result, torch.full((2, 3, 4), 3.0))
    with pytest.raises(AssertionError, match="strides"):  # not contiguous is our mistake
        ring_all_reduce(SingleCommunicator(), torch.zeros(3, 4).t())


# -- traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_bytes_of_a_ring(world_size: int) -> None:
    """2(N-1)/N of the tensor per rank, half of it in each half, in 2(N-1) messages.

    Of any length: all shares but its own, then all but its right neighbour's.
    """

    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[Any], list[int]]:
        found = []
        for dtype, run in product(DTYPES, (ring_all_reduce, ring_reduce_scatter, ring_all_gather)):
            comm = RecordingCommunicator(ProcessGroupCommunicator(group))
            run(comm, torch.ones(LENGTH, dtype=dtype))
            assert comm.operations == {"exchange": comm.sent_messages}
            found.append((comm.sent_bytes, comm.sent_messages))
        sent = []
        for length in LENGTHS:
            comm = RecordingCommunicator(ProcessGroupCommunicator(group))
            ring_all_reduce(comm, torch.ones(length), chunk_bytes=64)
            sent.append(comm.sent_bytes)
        return found, sent

    expected = []
    for dtype in DTYPES:
        half = ((world_size - 1) * LENGTH * dtype.itemsize // world_size, world_size - 1)
        expected += [(2 * half[0], 2 * half[1]), half, half]
    for rank, (found, sent) in enumerate(run_thread_ranks(work, world_size)):
        assert found == expected
        for length, sent_bytes in zip(LENGTHS, sent, strict=True):
            shards = torch.empty(length).tensor_split(world_size)
            left_out = len(shards[rank]) + len(shards[(rank + 1) % world_size])
            assert sent_bytes == 4 * (2 * length - left_out)


@pytest.mark.parametrize(
    ("num_nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (2, 3), (1, 4), (2, 4)]
)
def test_bytes_of_two_levels(num_nodes: int, per_node: int) -> None:
    """Between nodes 2(M-1)/M of 1/n of the tensor per rank; inside 2(n-1)/n of it."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        node, place = divmod(rank, per_node)
        inside, between = (RecordingCommunicator(ProcessGroupCommunicator(group)) for _ in range(2))
        intra = Subset(inside, [node * per_node + i for i in range(per_node)])
        inter = Subset(between, [i * per_node + place for i in range(num_nodes)])
        hierarchical_all_reduce(intra, inter, torch.ones(LENGTH), equal_nodes=True)
        return inside.sent_bytes, between.sent_bytes

    inside = 2 * (per_node - 1) * 4 * LENGTH // per_node
    between = 2 * (num_nodes - 1) * (4 * LENGTH // per_node) // num_nodes
    for found in run_thread_ranks(work, num_nodes * per_node):
        assert found == (inside, between)


def test_leaders_send_between_nodes_and_nobody_else() -> None:
    """Nodes of 3 and 2: the ring of two leaders costs each of them the tensor once."""

    def work(rank: int, group: dist.ProcessGroup) -> int:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        intra = Subset(ProcessGroupCommunicator(group), [0, 1, 2] if rank < 3 else [3, 4])
        inter = Subset(comm, [[0, 3], [1, 4], [2]][rank % 3])
        hierarchical_all_reduce(intra, inter, torch.ones(LENGTH), equal_nodes=False)
        return comm.sent_bytes

    assert run_thread_ranks(work, 5) == [4 * LENGTH, 0, 0, 4 * LENGTH, 0]
