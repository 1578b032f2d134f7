"""Memory without a name that several processes map: Linux's memfd.

There is nothing in /dev/shm at any moment, so nothing can be left there when a process is killed,
and a container's small /dev/shm (64 MB by default in Docker) is no limit. A peer opens the memory
through /proc/PID/fd, which works for processes of one user that see each other's numbers.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer finds a segment."""

    pid: int
    """Process that made it."""
    fd: int
    """Its descriptor there; valid until the maker closes it."""
    inode: int
    """Of the file behind it: proves that /proc showed the right one."""


class Segment:
    """`num_bytes` of memory, zeros, mapped into this process as `memory`, uint8 [num_bytes].

    Raises:
        OSError: there is not so much memory, or the kernel has no memfd.
    """

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("gradsync", os.MFD_CLOEXEC)
        try:
            # Pages are taken now, by the rank that fills them: a lack of memory is an error here,
            # and no bus error in the middle of a step.
            os.posix_fallocate(self._fd, 0, num_bytes)
            self.address = Address(os.getpid(), self._fd, os.fstat(self._fd).st_ino)
            self.memory = _mapped(self._fd, num_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def close_door(self) -> None:
        """Nobody can map it any more; those who have keep it as long as they hold the tensor."""
        os.close(self._fd)


def open_segment(address: Address, num_bytes: int) -> Tensor:
    """The memory of a peer's segment, uint8 [num_bytes], shared with it.

    Raises:
        OSError: the peer's process or descriptor cannot be reached from here.
    """
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != address.inode:
            raise OSError("process numbers mean other processes here")
        return _mapped(fd, num_bytes)
    finally:
        os.close(fd)


def _mapped(fd: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(fd, num_bytes)
    with suppress(OSError):  # where the kernel has huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds the map: it is undone when the last view goes.
    return torch.frombuffer(memory, dtype=torch.uint8)
