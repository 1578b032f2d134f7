"""The seam between gradient synchronisation and whoever moves the bytes.

A `Communicator` answers three questions for a fixed set of ranks: who am I, how do we combine a
tensor, how do we hand one on. World size 1 is an ordinary communicator (`SingleCommunicator`), so
callers never branch on it. Every collective returns a `Work`; somebody visibly calls `wait()`.
All ranks must call the same collectives in the same order with equal shapes and dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

ReduceOp = Literal["sum", "min", "max"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is in the tensor (on CUDA: until the current stream may use it).

        Raises:
            RuntimeError: when a peer vanished or the timeout passed.
        """
        ...


class Communicator(Protocol):
    """Collectives over a fixed set of ranks, in torch's spelling."""

    @property
    def rank(self) -> int:
        """Index of this rank in the communicator."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

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


class Done:
    """The `Work` of something that has already happened."""

    def wait(self) -> None:
        """Return at once."""
