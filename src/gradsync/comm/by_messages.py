"""Collectives built from messages, for small tensors: every rank sends its tensor to every other.

On a separate channel such a communicator interferes with no other traffic: a second thread may use
it, and so may some ranks of a group that have no process group to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Done, Messenger, ReduceOp, Work
from gradsync.comm.combine import combine

if TYPE_CHECKING:
    from torch import Tensor


class ByMessages:
    """A `Communicator` over the ranks of `messenger`; its collectives block.

    Args:
        messenger: carries everything.
        group: the torch process group behind it, if known; its timeout is then known too.
    """

    def __init__(self, messenger: Messenger, group: Any = None) -> None:
        self.messenger = messenger
        self.group = group
        self.rank = messenger.rank
        self.world_size = messenger.world_size

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`; combined in rank order."""
        flat = tensor.detach().reshape(-1)
        rows = self._gathered(flat)
        for row in rows[1:]:
            combine(op, rows[0], row, out=rows[0])
        tensor.detach().copy_(rows[0].view(tensor.shape))
        return Done()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        flat = tensor.detach().contiguous()
        if self.rank == src:
            self.messenger.exchange([(flat, peer) for peer in self._peers()], []).wait()
        else:
            self.messenger.exchange([], [(flat, src)]).wait()
            tensor.detach().copy_(flat)
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        output.copy_(self._gathered(tensor).view(-1))
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        whole = tensor.clone()
        self.all_reduce(whole, op)
        output.copy_(whole.view(self.world_size, -1)[self.rank])
        return Done()

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._gathered(torch.zeros(1, dtype=torch.uint8))

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Messenger.exchange`."""
        return self.messenger.exchange(sends, receives, channel)

    def _gathered(self, flat: Tensor) -> Tensor:
        """Every rank's `flat`, [n], as [world_size, n]."""
        rows = flat.new_empty(self.world_size, flat.numel())
        rows[self.rank].copy_(flat)
        sends = [(rows[self.rank], peer) for peer in self._peers()]
        self.messenger.exchange(sends, [(rows[peer], peer) for peer in self._peers()]).wait()
        return rows

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]
