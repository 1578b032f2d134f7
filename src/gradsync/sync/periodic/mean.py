"""The mean of tensors over ranks: one flat all-reduce for each dtype, one division."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator

if TYPE_CHECKING:
    from torch import Tensor


def mean_over_ranks(tensors: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
    """The mean of each tensor over all ranks of `comm`, as new tensors, the same bits on each rank.

    Half precision is summed and returned in fp32, so that it is rounded once, when the caller
    copies the mean back. Memory: one copy of `tensors`.

    Args:
        tensors: floating point, any shapes; the same shapes and dtypes on all ranks.
        comm: all ranks call it.
    """
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        wire = torch.promote_types(tensor.dtype, torch.float32)
        members.setdefault((wire, tensor.device), []).append(index)
    under_way = []
    for (wire, _), indices in members.items():
        flat = torch.cat([tensors[index].detach().reshape(-1).to(wire) for index in indices])
        # Whole group, [all elements of one dtype], fp32 or fp64; overlaps only its own kind.
        under_way.append((comm.all_reduce(flat), flat, indices))
    means: dict[int, Tensor] = {}
    for work, flat, indices in under_way:
        work.wait()
        flat.div_(comm.world_size)
        parts = flat.split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            means[index] = part.view(tensors[index].shape)
    return [means[index] for index in range(len(tensors))]


def average_buffers(
    buffers: Sequence[Tensor], starts: Sequence[Tensor], comm: Communicator
) -> None:
    """Make buffers equal on all ranks: floating ones their mean, counters and masks rank 0's.

    The mean is taken of the changes since `starts`: the mean of three equal numbers need not be
    that number, and a table that no rank changes must keep its bits.

    Args:
        buffers: any shapes; the same shapes and dtypes on all ranks.
        starts: earlier values of `buffers`, equal on all ranks.
        comm: the ranks.
    """
    floating = [(b, s) for b, s in zip(buffers, starts, strict=True) if b.is_floating_point()]
    with torch.no_grad():
        means = mean_over_ranks([_wide(b) - _wide(s) for b, s in floating], comm)
        for (buffer, start), change in zip(floating, means, strict=True):
            buffer.copy_(_wide(start) + change)
        for buffer in buffers:
            if not buffer.is_floating_point():
                comm.broadcast(buffer).wait()  # whole group, the buffer's shape and dtype


def _wide(tensor: Tensor) -> Tensor:
    """Convert to fp32 at least: half precision shall be rounded once."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
