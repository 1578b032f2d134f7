"""World size 1 as an ordinary communicator: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.comm.base import Done, ReduceOp, Work

if TYPE_CHECKING:
    from torch import Tensor


class SingleCommunicator:
    """One rank, no process group, no bytes moved."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Return at once: the combination over one rank is the tensor itself."""
        return Done()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Return at once: there is no other rank."""
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Copy `tensor`, shape [n], into `output`, shape [n]."""
        output.copy_(tensor)
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Copy `tensor`, shape [n], into `output`, shape [n]."""
        output.copy_(tensor)
        return Done()

    def barrier(self) -> None:
        """Return at once."""

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """Check that both lists are empty: there is no other rank."""
        assert len(sends) + len(receives) == 0, "a message to oneself"
        return Done()
