"""Buckets that lie in memory of the host, summed over all hosts on a thread beside backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradsync.comm.background import Background
from gradsync.comm.base import Communicator, Work
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.unavailable import SharedMemoryError
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.sums import Sums

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BYTES = 2**20
"""Of a bucket that gets memory of its own: a process cannot map any number of them, and short
tensors go through the small buffers as fast."""


class OverHosts:
    """See `Transport`.

    The thread alone waits for other ranks; the main thread meets those of the host, by messages,
    when a bucket is launched for the first time.

    Args:
        host: the ranks of this host, for nobody else's use; closed with the transport.
        all_reduce: over all hosts, in place, blocking; best for what lies in `host`'s memory.
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
        """Nothing to tell."""

    def launch(self, bucket: Bucket) -> Work:
        """See `Transport.launch`."""
        if bucket not in self._seen:
            self._seen.add(bucket)
            self._move_in(bucket)
        flat = bucket.flat(0)
        return self._background.submit(lambda: self._all_reduce(flat))

    def _move_in(self, bucket: Bucket) -> None:
        """Let the bucket lie in shared memory, if that is worth it and there is enough."""
        self._let_go()
        flat = bucket.flat(0)
        if flat.numel() * flat.element_size() < LEAST_BYTES:
            return
        try:
            memory = self._host.allocate(flat.numel(), flat.dtype)
        except SharedMemoryError:
            return  # on all ranks of the host; there it goes through small buffers
        bucket.adopt(0, memory)
        self._homes.append((weakref.ref(bucket), memory))

    def _let_go(self) -> None:
        """Of the memory of buckets that have been laid out anew."""
        for owner, memory in self._homes:
            if owner() is None:
                self._host.release(memory)
        self._homes = [home for home in self._homes if home[0]() is not None]

    def close(self) -> None:
        """End the thread, and part with the host's other ranks."""
        self._background.close()
        self._host.close()
