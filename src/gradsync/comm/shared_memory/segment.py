"""Memory without a name that several processes map: Linux's memfd.

No file is ever in /dev/shm, so none can be left there when a process is killed, and a container's
small /dev/shm (64 MB by default in Docker) is no limit. A peer opens the memory through
/proc/PID/fd, which works for processes of one user that see each other's process ids.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer finds a segment."""

    pid: int
    """Process that made it."""
    fd: int
    """The maker's descriptor; valid until the maker closes it."""
    token: int
    """Drawn by the maker, and written behind the memory: a process id from another host or
    container may belong to another process here, with such a descriptor."""


class Segment:
    """`num_bytes` of memory (a multiple of 8), zeros, mapped here as `memory`, uint8 [num_bytes].

    The caller has checked that so much is available: the kernel would first take all there is.

    Raises:
        OSError: too little memory, or the kernel has no memfd.
    """

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("gradsync", os.MFD_CLOEXEC)
        try:
            # Pages are taken now, by the rank that fills them: a lack of memory is an error here,
            # and not a bus error in the middle of a step.
            os.posix_fallocate(self._fd, 0, num_bytes + _TOKEN_BYTES)
            self.address = Address(os.getpid(), self._fd, secrets.randbits(62))
            self.memory, token = _mapped(self._fd, num_bytes)
            token.fill_(self.address.token)
        except BaseException:
            os.close(self._fd)
            raise

    def close_door(self) -> None:
        """Close the descriptor: no process can map it any more; existing maps stay valid."""
        os.close(self._fd)


def open_segment(address: Address, num_bytes: int) -> Tensor:
    """Map the memory of a peer's segment, uint8 [num_bytes], shared with it.

    Raises:
        OSError: the peer's process or descriptor is unreachable, or belongs to another process.
    """
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != num_bytes + _TOKEN_BYTES:
            raise OSError("another file")
        memory, token = _mapped(fd, num_bytes)
        if int(token) != address.token:
            raise OSError("another segment")
        return memory
    finally:
        os.close(fd)


def _mapped(fd: int, num_bytes: int) -> tuple[Tensor, Tensor]:
    """The memory, and the token behind it, int64 []."""
    memory = mmap.mmap(fd, num_bytes + _TOKEN_BYTES)
    with suppress(OSError):  # where the kernel has huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor owns the map: it is unmapped when the last view is freed.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[:num_bytes], whole[num_bytes:].view(torch.int64)[0]
