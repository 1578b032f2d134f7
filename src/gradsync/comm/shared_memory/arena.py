"""Memory that all ranks of a host allocate together, each seeing the others' parts."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.shared_memory.segment import Address, Segment, open_segment
from gradsync.comm.shared_memory.unavailable import MESSAGES, Reason, SharedMemoryError
from gradsync.runtime.machine import available_bytes

_SPARE_BYTES = 256 * 2**20
"""Bytes of available memory that an allocation leaves to everything else."""


def map_together(base: Communicator, sizes: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Allocate zeros, `sizes[rank]` bytes, and map the other ranks' memory; all ranks call it.

    Two small all-gathers over `base`, int64 [4] and [1] from each rank, on the CPU.

    Returns:
        Memory of each rank, uint8 [sizes[rank]] (the memory nearest to it), and its process id.

    Raises:
        SharedMemoryError: on all ranks, when it fails on one of them.
    """
    segment, reason = _make(sizes[base.rank], sum(sizes))
    address = Address(0, 0, 0) if segment is None else segment.address
    seats = torch.zeros(4 * base.world_size, dtype=torch.int64)
    mine = torch.tensor([int(reason), address.pid, address.fd, address.token])
    base.all_gather(seats, mine).wait()
    told = [tuple(seat) for seat in seats.view(-1, 4).tolist()]
    memories: list[Tensor] = []
    reason = Reason(max(found for found, *_ in told))
    if reason is Reason.NONE:
        assert segment is not None
        reason, memories = _open(base.rank, segment, told, sizes)
    verdicts = torch.zeros(base.world_size, dtype=torch.int64)
    base.all_gather(verdicts, torch.tensor([int(reason)])).wait()
    if segment is not None:
        segment.close_door()
    if worst := int(verdicts.max()):
        raise SharedMemoryError(f"no shared memory: {MESSAGES[Reason(worst)]}")
    return memories, [pid for _, pid, _, _ in told]


def _make(num_bytes: int, total_bytes: int) -> tuple[Segment | None, Reason]:
    # All ranks of the host allocate at the same time.
    if total_bytes + _SPARE_BYTES > available_bytes():
        return None, Reason.NO_MEMORY
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return None, Reason.NO_PIDFD
    try:
        return Segment(num_bytes), Reason.NONE
    except OSError as error:
        full = error.errno in _FULL
        return None, Reason.NO_MEMORY if full else Reason.NO_MEMFD


def _open(
    rank: int, segment: Segment, told: list[tuple[int, ...]], sizes: Sequence[int]
) -> tuple[Reason, list[Tensor]]:
    memories = []
    for peer, (_, *address) in enumerate(told):
        if peer == rank:
            memories.append(segment.memory)
            continue
        try:
            memories.append(open_segment(Address(*address), sizes[peer]))
        except OSError as error:
            return (Reason.NO_MEMORY if error.errno in _FULL else Reason.NO_PEER), []
    return Reason.NONE, memories


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation, seen from one rank."""

    mine: Tensor
    """This rank's part, [numel] of some dtype."""
    parts: list[Tensor]
    """Parts of all ranks, in rank order, this rank's included."""
    number: int
    """Identifies it, equal on all ranks."""

    def offset_of(self, tensor: Tensor) -> int | None:
        """Elements in front of `tensor` if it is contiguous and lies in `mine`; else None."""
        start = self.mine.data_ptr()
        offset, rest = divmod(tensor.data_ptr() - start, self.mine.element_size())
        inside = offset >= 0 and offset + tensor.numel() <= self.mine.numel() and not rest
        fits = inside and tensor.dtype == self.mine.dtype and tensor.is_contiguous()
        return offset if fits else None


def allocate(base: Communicator, numel: int, dtype: torch.dtype, number: int) -> Region:
    """Allocate zeros on every rank; see `map_together`.

    Args:
        base: the ranks of the host.
        numel: number of elements on each rank.
        dtype: of the elements.
        number: identifies the region, equal on all ranks.
    """
    memories, _ = map_together(base, [_pages(numel * dtype.itemsize)] * base.world_size)
    parts = [memory[: numel * dtype.itemsize].view(dtype) for memory in memories]
    return Region(parts[base.rank], parts, number)


def allocate_once(base: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate zeros, the same memory on every rank; see `map_together`.

    Args:
        base: the ranks of the host.
        numel: number of elements.
        dtype: of the elements.
    """
    rest = [_PAGE] * (base.world_size - 1)
    memories, _ = map_together(base, [_pages(numel * dtype.itemsize), *rest])
    return memories[0][: numel * dtype.itemsize].view(dtype)


def _pages(num_bytes: int) -> int:
    return math.ceil(max(num_bytes, 1) / _PAGE) * _PAGE


_PAGE = 4096
_FULL = (errno.ENOMEM, errno.ENOSPC)
