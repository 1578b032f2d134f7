"""Placement of ranks: the node and local rank of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.world import World


@dataclass(frozen=True, slots=True)
class Placement:
    """Node and local rank of every rank. Frozen, equal on all ranks.

    Raises:
        ConfigError: two ranks with the same node and local rank.
    """

    seats: tuple[tuple[int, int], ...]
    """(node_rank, local_rank) of each rank."""

    def __post_init__(self) -> None:
        for rank, seat in enumerate(self.seats):
            first = self.seats.index(seat)
            if first != rank:
                raise ConfigError(
                    f"ranks {first} and {rank} both say node_rank={seat[0]} local_rank={seat[1]}; "
                    "each rank needs its own place: check the World they were given"
                )

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks of each node, ascending; nodes in order."""
        found: dict[int, list[int]] = {}
        for rank, (node, _) in enumerate(self.seats):
            found.setdefault(node, []).append(rank)
        return [found[node] for node in sorted(found)]

    @property
    def equal_nodes(self) -> bool:
        """True when all nodes have the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @property
    def columns(self) -> list[list[int]]:
        """The i-th rank of each node with more than i ranks, ascending, for each i.

        By position in the node's list, not by local rank: the i-th rank in the communicator of one
        node must meet the i-th of the others, and torch sorts the ranks of a new group.
        """
        most = max(len(ranks) for ranks in self.nodes)
        return [sorted(ranks[i] for ranks in self.nodes if i < len(ranks)) for i in range(most)]

    def node_of(self, rank: int) -> list[int]:
        """All ranks on the node of `rank`, including `rank`."""
        return next(ranks for ranks in self.nodes if rank in ranks)

    def column_of(self, rank: int) -> list[int]:
        """All ranks in the column of `rank`, including `rank`."""
        return next(ranks for ranks in self.columns if rank in ranks)


def share_placement(
    comm: Communicator, world: World, device: torch.device | str = "cpu"
) -> Placement:
    """Exchange the placement of all ranks: one all-gather over `comm`, int64 [2] from each rank.

    Args:
        comm: all ranks of `world`, in rank order.
        world: this rank's world.
        device: device on which `comm` takes small tensors.
    """
    mine = torch.tensor([world.node_rank, world.local_rank], device=device)
    seats = torch.zeros(2 * comm.world_size, dtype=mine.dtype, device=device)
    comm.all_gather(seats, mine).wait()
    return Placement(tuple((node, local) for node, local in seats.view(-1, 2).tolist()))
