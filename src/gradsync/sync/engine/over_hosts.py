"""Buckets in memory shared by a host's ranks, summed over hosts on a thread beside backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator, Work
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.comm.work import Background
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.sums import Sums

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BYTES = 2**20
"""Least size of a bucket that gets shared memory: a process can map only so many regions, and
short tensors go through the small buffers as fast."""


class OverHosts:
    """A `Transport` for ranks on several hosts.

    Only the thread waits for other ranks; the main thread exchanges messages with those of the host
    when a bucket is launched for the first time.

    Args:
        host: the ranks of this host, for this transport alone; closed with it.
        all_reduce: over all hosts, in place, blocking; fastest on `host`'s memory.
    """

    def __init__(
        self, host: SharedMemoryCommunicator, all_reduce: Callable[[Tensor], None]
    ) -> None:
        self._host, self._all_reduce = host, all_reduce
        self._background = Background()
        self._homes: list[tuple[weakref.ref[Bucket], Tensor]] = []
        self._seen: weakref.WeakSet[Bucket] = weakref.WeakSet()

    @property
    def host(self) -> Communicator:
        """The ranks of this host."""
        return self._host

    def begin(self, sums: Sums) -> None:
        """Do nothing: the sums do not depend on leaves."""

    def launch(self, bucket: Bucket) -> Work:
        """See `Transport.launch`."""
        if bucket not in self._seen:
            self._seen.add(bucket)
            self._move_in(bucket)
        flat = bucket.flat(0)
        return self._background.submit(lambda: self._all_reduce(flat))

    def _move_in(self, bucket: Bucket) -> None:
        """Move the bucket into shared memory, if that is worth it and enough is available."""
        self._let_go()
        flat = bucket.flat(0)
        if flat.numel() * flat.element_size() < LEAST_BYTES:
            return
        try:
            memory = self._host.allocate(flat.numel(), flat.dtype)
        except SharedMemoryError:
            return  # on all ranks of the host; there the bucket goes through small buffers
        bucket.adopt(0, memory)
        self._homes.append((weakref.ref(bucket), memory))

    def _let_go(self) -> None:
        """Release the memory of buckets that have been laid out again."""
        for owner, memory in self._homes:
            if owner() is None:
                self._host.release(memory)
        self._homes = [home for home in self._homes if home[0]() is not None]

    def close(self) -> None:
        """End the thread, and leave the host's other ranks."""
        self._background.close()
        self._host.close()
