"""Memory that all ranks of a host allocate together and map from each other: Linux's memfd.

Nothing is in /dev/shm, so a killed process leaves no file there, and a container's small /dev/shm
(64 MB by default in Docker) is no limit. A peer opens the memory through /proc/PID/fd, which works
for processes of one user that see each other's process ids.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.errors import RunError
from gradsync.runtime.machine import available_bytes

_TOKEN_BYTES = 8
_PAGE = 4096
_FULL = (errno.ENOMEM, errno.ENOSPC)
_SPARE_BYTES = 256 * 2**20
"""Bytes of available memory that an allocation must leave free."""

_NO_PEER, _NO_CALL, _NO_MEMORY = range(1, 4)
_REASONS = {
    _NO_PEER: "the ranks are not on one host, or not in one container (they cannot see each other "
    "in /proc)",
    _NO_CALL: "the kernel (older than 5.3), or a container's seccomp profile, does not allow "
    "memfd_create or pidfd_open",
    _NO_MEMORY: "there is too little free memory for the shared buffers: stop other processes, "
    "raise the container's memory limit, or use fewer ranks per host",
}
"""One rank's result, if not 0; ranks exchange the numbers and report the greatest one."""


class SharedMemoryError(RunError):
    """The ranks cannot share memory; raised on all of them."""


class Address(NamedTuple):
    """Address at which a peer finds a segment."""

    pid: int
    """Process that made it."""
    fd: int
    """The maker's descriptor; valid until the maker closes it."""
    token: int
    """Random, written after the memory. It detects a process id from another host or container that
    belongs to another process here."""


class Segment:
    """`num_bytes` of memory (a multiple of 8), zeros, mapped here as `memory`, uint8 [num_bytes].

    The caller has checked that this much is available: the kernel would first use up all memory.
    OSError: too little memory, or the kernel has no memfd.
    """

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("gradsync", os.MFD_CLOEXEC)
        try:
            # The rank that fills the pages reserves them now: too little memory is an error here,
            # not a bus error in the middle of a step.
            os.posix_fallocate(self._fd, 0, num_bytes + _TOKEN_BYTES)
            self.address = Address(os.getpid(), self._fd, secrets.randbits(62))
            self.memory, token = _mapped(self._fd, num_bytes)
            token.fill_(self.address.token)
        except BaseException:
            self.close_door()
            raise

    def close_door(self) -> None:
        """Close the descriptor: no further process can map it; existing maps stay valid."""
        os.close(self._fd)


def open_segment(address: Address, num_bytes: int) -> Tensor:
    """Map the memory of a peer's segment, uint8 [num_bytes], shared with it. OSError: the peer's
    process or descriptor is unreachable, or is another process's."""
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
    """The memory, and the token that follows it, int64 []."""
    memory = mmap.mmap(fd, num_bytes + _TOKEN_BYTES)
    with suppress(OSError):  # if the kernel has huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor owns the map: it is unmapped when the last view is freed.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[:num_bytes], whole[num_bytes:].view(torch.int64)[0]


def map_together(base: Communicator, sizes: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Allocate zeros, `sizes[rank]` bytes, and map the other ranks' memory; all ranks call it.
    Returns each rank's memory, uint8 [sizes[rank]] (nearest to that rank), and its process id.

    Two small all-gathers over `base`, int64 [4] and [1] from each rank, on the CPU.
    SharedMemoryError on all ranks, when it fails on one of them.
    """
    whole_pages = [-(-max(size, 1) // _PAGE) * _PAGE for size in sizes]
    segment, reason = None, 0
    if sum(whole_pages) + _SPARE_BYTES > available_bytes():  # all ranks allocate at the same time
        reason = _NO_MEMORY
    else:
        try:
            os.close(os.pidfd_open(os.getpid()))
            segment = Segment(whole_pages[base.rank])
        except OSError as error:
            reason = _NO_MEMORY if error.errno in _FULL else _NO_CALL
    address = Address(0, 0, 0) if segment is None else segment.address
    seats = torch.zeros(4 * base.world_size, dtype=torch.int64)
    base.all_gather(seats, torch.tensor([reason, *address])).wait()
    told = seats.view(-1, 4).tolist()
    memories: list[Tensor] = []
    reason = max(found for found, *_ in told)
    if segment is not None and not reason:
        try:
            for peer, (_, *seat) in enumerate(told):
                mine = peer == base.rank
                here = segment.memory if mine else open_segment(Address(*seat), whole_pages[peer])
                memories.append(here[: sizes[peer]])
        except OSError as error:
            reason = _NO_MEMORY if error.errno in _FULL else _NO_PEER
    verdicts = torch.zeros(base.world_size, dtype=torch.int64)
    base.all_gather(verdicts, torch.tensor([reason])).wait()
    if segment is not None:
        segment.close_door()
    if worst := int(verdicts.max()):
        raise SharedMemoryError(f"no shared memory: {_REASONS[worst]}")
    return memories, [pid for _, pid, _, _ in told]
