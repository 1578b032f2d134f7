"""Two levels, on nodes of equal and unequal size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, Subset
from gradsync.comm.p2p_collectives import (
    P2PCommunicator,
    hierarchical_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.comm_cases import (
    check_algorithm,
    check_all,
    rank_input,
)
from support.host_layouts import LAYOUTS, placement
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leaders", [False, True])
def test_any_layout(layout: str, leaders: bool) -> None:
    places = placement(LAYOUTS[layout])
    equal_nodes = places.equal_nodes and not leaders

    def all_reduce(comm: Communicator, tensor: torch.Tensor, op: str) -> None:
        intra = Subset(comm, places.node_of(comm.rank))
        inter = Subset(comm, places.column_of(comm.rank))
        hierarchical_all_reduce(intra, inter, tensor, op, equal_nodes=equal_nodes)

    check_algorithm(len(places.seats), all_reduce)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_trees(world_size: int) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        comm = ProcessGroupCommunicator(group)
        tensor = rank_input(rank, 10, torch.int64)
        tree_reduce(comm, tensor)
        if rank:
            tensor.fill_(-1)
        tree_broadcast(comm, tensor)
        return tensor

    check_all(run_thread_ranks(work, world_size), "sum")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_by_messages(world_size: int) -> None:
    """What a group's own collectives do, without a group."""

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        alone = SingleCommunicator() if world_size == 1 else ProcessGroupCommunicator(group)
        comm = P2PCommunicator(Subset(alone, range(world_size)))
        mine = rank_input(rank, 5, torch.float32)
        summed, largest, sent = mine.clone(), mine.clone(), mine.clone()
        gathered, slices = torch.zeros(5 * world_size), torch.zeros(2)
        comm.all_reduce(summed.view(1, 5)).wait()
        comm.all_reduce(largest, "max").wait()
        comm.broadcast(sent, world_size - 1).wait()
        comm.all_gather(gathered, mine).wait()
        comm.reduce_scatter(slices, torch.arange(2.0 * world_size) + rank).wait()
        comm.barrier()
        return {"sum": summed, "max": largest, "sent": sent, "all": gathered, "slice": slices}

    inputs = torch.stack([rank_input(rank, 5, torch.float32) for rank in range(world_size)])
    for rank, found in enumerate(run_thread_ranks(work, world_size)):
        torch.testing.assert_close(found["sum"], inputs.sum(0))
        assert torch.equal(found["max"], inputs.amax(0))
        assert torch.equal(found["sent"], inputs[-1])
        assert torch.equal(found["all"], inputs.view(-1))
        whole = world_size * torch.arange(2.0 * world_size) + sum(range(world_size))
        assert torch.equal(found["slice"], whole[2 * rank : 2 * rank + 2])
