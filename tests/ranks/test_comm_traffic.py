"""What each algorithm sends, counted: the formulas of the textbooks, to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.groups import SingleCommunicator, Subset
from gradsync.comm.p2p_collectives import (
    doubling_all_reduce,
    hierarchical_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.recording import RecordingCommunicator
from support.thread_ranks import run_thread_ranks

SIZES = (2, 3, 4, 6, 7, 8)
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (0, 1, 5, 1001)
LENGTH = 5 * 840  # 840 is divisible by 1..8


@pytest.mark.parametrize("world_size", SIZES)
def test_ring(world_size: int) -> None:
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

    def size(length: int, index: int) -> int:
        return len(torch.empty(length).tensor_split(world_size)[index % world_size])

    expected = []
    for dtype in DTYPES:
        half = ((world_size - 1) * LENGTH * dtype.itemsize // world_size, world_size - 1)
        expected += [(2 * half[0], 2 * half[1]), half, half]
    totals = dict.fromkeys(LENGTHS, 0)
    for rank, (found, sent) in enumerate(run_thread_ranks(work, world_size)):
        assert found == expected
        for length, sent_bytes in zip(LENGTHS, sent, strict=True):
            shares = size(length, rank) + size(length, rank + 1)
            assert sent_bytes == 4 * (2 * length - shares)
            assert abs(sent_bytes - 4 * 2 * (world_size - 1) * length / world_size) <= 4 * 2
            totals[length] += sent_bytes
    assert totals == {length: 4 * 2 * (world_size - 1) * length for length in LENGTHS}


@pytest.mark.parametrize("world_size", SIZES)
def test_doubling(world_size: int) -> None:
    """log2(N) times the tensor; where ranks fold, even ones once and odd ones once more."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        doubling_all_reduce(comm, torch.ones(1000))
        return comm.sent_bytes, comm.sent_messages

    rounds = {2: 1, 3: 1, 4: 2, 6: 2, 7: 2, 8: 3}[world_size]
    folded = {3: 2, 6: 4, 7: 6}.get(world_size, 0)
    for rank, found in enumerate(run_thread_ranks(work, world_size)):
        times = rounds
        if rank < folded:
            times = rounds + 1 if rank % 2 else 1
        assert found == (4000 * times, times)


@pytest.mark.parametrize(
    ("num_nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (2, 3), (1, 4), (2, 4)]
)
def test_hierarchical(num_nodes: int, per_node: int) -> None:
    """Between nodes 2(M-1)/M of 1/n of the tensor per rank; inside 2(n-1)/n of it."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        node, place = divmod(rank, per_node)
        levels = []
        for ranks in (
            [node * per_node + i for i in range(per_node)],
            [i * per_node + place for i in range(num_nodes)],
        ):
            comm = RecordingCommunicator(ProcessGroupCommunicator(group))
            levels.append((comm, Subset(comm, ranks)))
        (inside, intra), (between, inter) = levels
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


def test_collectives_are_passed_on_and_counted() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> RecordingCommunicator:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        tensor = torch.full((4,), float(rank))
        comm.all_reduce(tensor).wait()
        assert tensor.tolist() == [1.0] * 4
        comm.all_reduce(tensor, "max").wait()
        comm.broadcast(torch.zeros(3, dtype=torch.uint8)).wait()
        comm.all_gather(torch.zeros(8), tensor).wait()
        comm.reduce_scatter(torch.zeros(1), torch.zeros(2), "min").wait()
        comm.barrier()
        sent = comm.exchange([(tensor, 1 - rank), (torch.zeros(0), 1 - rank)], [])
        comm.exchange([], [(torch.zeros(4), 1 - rank), (torch.zeros(0), 1 - rank)]).wait()
        sent.wait()
        return comm

    for comm in run_thread_ranks(work, 2):
        assert comm.operations == {
            **{"all_reduce": 2, "broadcast": 1, "all_gather": 1, "reduce_scatter": 1},
            **{"barrier": 1, "exchange": 2},
        }
        assert comm.tensor_bytes == {
            **{"all_reduce": 32, "broadcast": 3, "all_gather": 32, "reduce_scatter": 8}
        }
        assert (comm.sent_bytes, comm.sent_messages) == (16, 1)
        assert comm.ring_bytes() == 32 + (3 + 32 + 8) / 2


def test_one_rank_sends_nothing() -> None:
    comm = RecordingCommunicator(SingleCommunicator())
    for run in (ring_all_reduce, doubling_all_reduce):
        run(comm, torch.ones(1000))
    comm.all_reduce(torch.ones(10)).wait()
    assert (comm.sent_bytes, comm.operations, comm.ring_bytes()) == (0, {"all_reduce": 1}, 0)
