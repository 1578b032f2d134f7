"""Sums along the fixed tree where ranks share memory, for engines that need whole buckets.

Every rank adds its part of each bucket over all ranks' buffers, and writes it into all of them. The
additions are those of `TreeTransport`, which uses messages, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradsync.comm.kernels import even_parts, reduce_in_place
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.leaf_tree import UNKNOWN
from gradsync.sync.engine.sums import FORGOTTEN, Sums
from gradsync.sync.host.operands import sum_of_leaves

if TYPE_CHECKING:
    from torch import Tensor


class SharedTree:
    """A `Transport`, and the `Work` of all its buckets. Nothing happens beside backward, so the
    recipe must not ask for it.

    Args:
        comm: the ranks of the host.
    """

    def __init__(self, comm: SharedMemoryCommunicator) -> None:
        self._comm = comm
        self._memory: dict[Bucket, list[list[Tensor]]] = {}
        """Bucket -> buffer number -> rank -> [bucket.plan.numel]."""
        self._waiting: list[Bucket] = []

    def lay_out(self, buckets: Iterable[Bucket], count: int = 1) -> None:
        """Allocate `count` buffers of each bucket in shared memory; all ranks call it.

        Raises:
            SharedMemoryError: on all ranks, when there is too little memory.
        """
        for bucket in buckets:
            memory = self._memory.setdefault(bucket, [])
            while len(memory) < count:
                mine = self._comm.allocate(bucket.plan.numel, bucket.dtype)
                parts = self._comm.parts_of(mine)
                assert parts is not None, "allocated just now"
                self._comm.release(mine)  # it lives as long as the buckets do
                bucket.adopt(len(memory), mine)
                memory.append(parts)

    def begin(self, sums: Sums) -> None:
        """See `Transport.begin`; peers read the numbers after the step's small message."""
        first = UNKNOWN if sums.first_leaf is None else sums.first_leaf
        self._comm.note([sums.num_leaves, first])
        self._waiting.clear()

    def launch(self, bucket: Bucket) -> SharedTree:
        """See `Transport.launch`."""
        self._waiting.append(bucket)
        return self

    def wait(self) -> None:
        """See `Work.wait`."""
        told = [(leaves, first) for leaves, first in self._comm.notes(2)]
        buckets, self._waiting = self._waiting, []
        if not buckets or any(first == FORGOTTEN for _, first in told):
            return
        found = sum_of_leaves(told)
        self.lay_out(buckets, found.num_buffers)

        def share() -> None:
            for bucket in buckets:
                memory = self._memory[bucket]
                mine = even_parts(bucket.plan.numel, self._comm.world_size)[self._comm.rank]
                operands = [memory[number][rank][mine] for rank, number in found.operands]
                copies = [part[mine] for part in memory[0]]
                reduce_in_place(operands, found.pairs, found.end, copies)

        # All ranks of the host, every bucket, each [numel] of its dtype; overlaps nothing.
        self._comm.run(share, "the sum of buckets along the tree").wait()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
