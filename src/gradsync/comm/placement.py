"""Which rank sits where: the node and local rank of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.world import World


@dataclass(frozen=True, slots=True)
class Placement:
    """Every rank's seat. Frozen, equal on all ranks.

    Raises:
        ConfigError: two ranks in one seat.
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
        """The i-th rank of each node that has so many, ascending, for each i.

        By place in the node's list, not by local rank: whoever is i-th in the communicator of one
        node must meet the i-th of the others, and torch sorts the ranks of a new group.
        """
        most = max(len(ranks) for ranks in self.nodes)
        return [sorted(ranks[i] for ranks in self.nodes if i < len(ranks)) for i in range(most)]

    def node_of(self, rank: int) -> list[int]:
        """All ranks on the node of `rank`, itself included."""
        return next(ranks for ranks in self.nodes if rank in ranks)

    def column_of(self, rank: int) -> list[int]:
        """All ranks in the column of `rank`, itself included."""
        return next(ranks for ranks in self.columns if rank in ranks)


def share_placement(
    comm: Communicator, world: World, device: torch.device | str = "cpu"
) -> Placement:
    """Learn every rank's seat: one all-gather over `comm`, int64 [2] from each rank.

    Args:
        comm: all ranks of `world`, in rank order.
        world: this rank's own.
        device: where `comm` takes small tensors.
    """
    mine = torch.tensor([world.node_rank, world.local_rank], device=device)
    seats = torch.zeros(2 * comm.world_size, dtype=mine.dtype, device=device)
    comm.all_gather(seats, mine).wait()
    return Placement(tuple((node, local) for node, local in seats.view(-1, 2).tolist()))
