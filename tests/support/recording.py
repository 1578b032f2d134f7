"""A communicator that counts operations, bytes and messages, to prove what an algorithm sends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator, ReduceOp, Work

if TYPE_CHECKING:
    from torch import Tensor


class RecordingCommunicator:
    """Pass everything on to `inner` and count it. Any thread may use it.

    Bytes sent by `exchange` are counted exactly. Backends do not report what their collectives
    send: for those there are the tensors' bytes, and `ring_bytes` for the usual formula.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.operations: Counter[str] = Counter()
        """Calls, by method name."""
        self.tensor_bytes: Counter[str] = Counter()
        """Bytes of the tensors handed to collectives, by method name: the whole tensor where one
        side is a slice (`all_gather`'s output, `reduce_scatter`'s input)."""
        self.sent_to: Counter[int] = Counter()
        """Bytes this rank has sent by `exchange`, by the rank they went to."""
        self.sent_messages = 0
        """Messages this rank has sent by `exchange`; empty ones are not counted."""
        self._lock = threading.Lock()
        self.rank, self.world_size = inner.rank, inner.world_size

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent by `exchange`."""
        return self.sent_to.total()

    def ring_bytes(self) -> float:
        """Bytes this rank would have sent in collectives if the backend used rings.

        With N ranks and S bytes: all_reduce 2(N-1)/N S; reduce_scatter, all_gather and broadcast
        (N-1)/N S (for broadcast the mean over ranks). A formula, not a measurement.
        """
        share = (self.world_size - 1) / self.world_size
        twice = {"all_reduce": 2.0}
        return sum(twice.get(name, 1.0) * share * size for name, size in self.tensor_bytes.items())

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        self._count("all_reduce", tensor)
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        self._count("broadcast", tensor)
        return self.inner.broadcast(tensor, src)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        self._count("all_gather", output)
        return self.inner.all_gather(output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        self._count("reduce_scatter", tensor)
        return self.inner.reduce_scatter(output, tensor, op)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        with self._lock:
            self.operations["barrier"] += 1
        self.inner.barrier()

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Communicator.exchange`."""
        with self._lock:
            self.operations["exchange"] += 1
            for tensor, peer in sends:
                self.sent_to[peer] += tensor.numel() * tensor.element_size()
                self.sent_messages += tensor.numel() > 0
        return self.inner.exchange(sends, receives, channel)

    def _count(self, name: str, tensor: Tensor) -> None:
        with self._lock:
            self.operations[name] += 1
            self.tensor_bytes[name] += tensor.numel() * tensor.element_size()
