"""The interface between gradient synchronisation and what moves the bytes.

A `Communicator` answers three questions for a fixed set of ranks: which rank this is, how to
combine a tensor over ranks, how to pass one on. World size 1 is an ordinary communicator
(`SingleCommunicator`), so callers never branch on it. Every collective returns a `Work` to wait
for. All ranks must call the same collectives in the same order with equal shapes and dtypes.

`exchange` is the only primitive that is not a collective: messages between pairs of ranks.
Multi-step algorithms (`p2p_collectives`) use nothing else, so they can run on a background thread
while the main thread runs collectives. Collectives are matched by the order in which they are
issued, which two threads cannot guarantee; messages are matched by sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

ReduceOp = Literal["sum", "min", "max"]
Messages: TypeAlias = Sequence[tuple["Tensor", int]]
"""(contiguous tensor of any shape, destination or source rank)."""


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> None:
        """Block until the result is in the tensor (on CUDA: until the current stream may use it).

        Raises:
            RuntimeError: when a peer vanished or the timeout passed.
        """
        ...


class Messenger(Protocol):
    """Messages between a fixed set of ranks: all that a multi-step algorithm needs."""

    rank: int
    """Index of this rank in the communicator."""
    world_size: int
    """Number of ranks."""

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """One batch of messages: send each tensor to its rank, overwrite each tensor from its rank.

        The k-th message from a to b matches the k-th receive on b from a, counted over all batches;
        both must have the same size and dtype. A rank never sends to itself. A rank with nothing to
        send or receive need not call. A send may block until its receive is posted: two ranks that
        swap tensors do so in one batch. Messages only match receives of the same `channel`, which
        one thread at a time may use. Buffers belong to the batch until `wait()` returns.
        """
        ...


class Communicator(Messenger, Protocol):
    """Collectives over a fixed set of ranks, named as in torch, and messages."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Combine `tensor` (any shape) over all ranks, in place; all ranks get the same bits."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Overwrite `tensor` (any shape) on every rank with the one of rank `src`."""
        ...

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output`, shape [world_size * n], with each rank's `tensor`, shape [n], in order."""
        ...

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Combine `tensor`, shape [world_size * n]; rank r gets slice r in `output`, shape [n]."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...
