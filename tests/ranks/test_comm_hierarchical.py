"""Two levels, on nodes of equal and unequal size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.hierarchical import hierarchical_all_reduce, tree_broadcast, tree_reduce
from gradsync.comm.placement import Placement
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.subset import Subset
from support.comm_cases import (
    check_algorithm,
    check_all,
    rank_input,
)
from support.thread_ranks import run_thread_ranks

LAYOUTS = {
    "one rank a node": [0, 1, 2],
    "one node": [0, 0, 0],
    "2 x 2": [0, 0, 1, 1],
    "2 x 2, dealt round": [0, 1, 0, 1],
    "2 x 3": [0, 0, 0, 1, 1, 1],
    "3 x 2, mixed": [2, 0, 1, 1, 2, 0],
    "4 x 2": [0, 0, 1, 1, 2, 2, 3, 3],
    "3 + 1": [0, 0, 0, 1],
    "1 + 3 + 2": [0, 1, 1, 1, 2, 2],
}


def placement(nodes: list[int]) -> Placement:
    """Local ranks in rank order."""
    return Placement(tuple((node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)))


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


@pytest.mark.parametrize("world_size", range(1, 8))
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
