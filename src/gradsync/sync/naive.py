"""`naive`: one blocking all-reduce for each parameter, after backward. The shortest correct code.

    backward of the last leaf ───────────► all_reduce(p0) ► all_reduce(p1) ► … ► optimizer

It is the readable twin that every cleverer strategy is checked against. Bytes per rank and step:
2(W-1)/W x the gradients (a ring, Patarasuk & Yuan 2009); one operation per parameter; no overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator
from gradsync.sync.reducer import Reduction, sum_gradients, trainable

if TYPE_CHECKING:
    from torch import nn


class NaiveReducer:
    """Sums gradients over ranks, parameter by parameter. Replicas start from rank 0's values."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.forward = model
        self._comm = comm
        self._parameters = [parameter for _, parameter in trainable(model)]
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast(tensor.detach()).wait()  # whole group, the tensor's shape and dtype

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Nothing is learned: the order is the parameters' own."""

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Gradients just add up in `.grad`; there is nothing to arrange."""
        yield

    def reduce(self, used: list[bool]) -> Reduction:
        """See `Reducer.reduce`."""
        return sum_gradients(self._parameters, used, self._comm)
