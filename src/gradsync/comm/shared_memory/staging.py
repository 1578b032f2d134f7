"""Collectives over tensors in a rank's private memory, through small shared buffers.

The buffers stay in the cache. In an all-reduce a rank copies in only the slices that others add up,
and copies out only the sums that others computed.

[Note: Two buffers in turn] Data that a rank puts into a buffer in turn n are read by peers until
they have finished turn n, or (in `take`) until they finish n + 1. A buffer is filled again in turn
n + 2, which begins when all have finished n + 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradsync.comm.base import AllOf, ReduceOp, Work
from gradsync.comm.shared_memory.kernels import even_parts, reduce_into
from gradsync.comm.shared_memory.turns import Turns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STAGE_BYTES = 2**20
"""Size of each of the two buffers."""
_SMALL_BYTES = 2**14
"""Up to this size every rank adds up everything by itself: one meeting instead of two."""
_OPS = ("sum", "min", "max")


class Staging:
    """The buffers of one communicator.

    Args:
        rank: this rank.
        memories: one per rank, uint8 [2 STAGE_BYTES].
        turns: queue of operations.
    """

    def __init__(self, rank: int, memories: Sequence[Tensor], turns: Turns) -> None:
        self._rank, self._world_size, self._turns = rank, len(memories), turns
        self._halves = [
            [memory[start : start + STAGE_BYTES] for memory in memories]
            for start in (0, STAGE_BYTES)
        ]
        self._half = 0

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Work:
        """Combine `flat`, [n], in place."""
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            return self._small(flat, op)
        size = STAGE_BYTES // flat.element_size()
        return AllOf([self._large(piece, op) for piece in flat.split(size)])

    def _small(self, flat: Tensor, op: ReduceOp) -> Work:
        stages = self._next(flat.numel(), flat.dtype)
        return self._turns.submit(
            *described("all_reduce", flat, op),
            prepare=lambda: stages[self._rank].copy_(flat),
            share=lambda: reduce_into(flat, stages, op),
            alone=True,
        )

    def _large(self, flat: Tensor, op: ReduceOp) -> Work:
        stages = self._next(flat.numel(), flat.dtype)
        parts = even_parts(flat.numel(), self._world_size)
        mine = parts[self._rank]
        others = [(rank, part) for rank, part in enumerate(parts) if rank != self._rank]

        def prepare() -> None:
            for _, part in others:
                stages[self._rank][part].copy_(flat[part])

        def share() -> None:
            operands = [stage[mine] for stage in stages]
            operands[self._rank] = flat[mine]
            reduce_into(stages[self._rank][mine], operands, op)
            flat[mine].copy_(stages[self._rank][mine])

        def take() -> None:
            for rank, part in others:
                flat[part].copy_(stages[rank][part])

        what = described("all_reduce", flat, op)
        return self._turns.submit(*what, prepare=prepare, share=share, take=take)

    def broadcast(self, flat: Tensor, src: int) -> Work:
        """Overwrite `flat`, [n], with the one of rank `src`."""
        if not 0 <= src < self._world_size:  # before a buffer's turn is used up
            raise ValueError(f"src must be a rank from 0 to {self._world_size - 1}; got {src}")
        size = STAGE_BYTES // flat.element_size()
        return AllOf([self._broadcast(piece, src) for piece in flat.split(size)])

    def _broadcast(self, flat: Tensor, src: int) -> Work:
        stage = self._next(flat.numel(), flat.dtype)[src]
        here = self._rank == src
        return self._turns.submit(
            *described("broadcast", flat, place=(src,)),
            prepare=(lambda: stage.copy_(flat)) if here else _nothing,
            share=None if here else lambda: flat.copy_(stage),
            alone=True,
        )

    def all_gather(self, out: Tensor, flat: Tensor) -> Work:
        """Fill `out`, [ranks * n], with each rank's `flat`, [n]."""
        rows = out.view(self._world_size, -1)
        size = STAGE_BYTES // flat.element_size()
        starts = range(0, flat.numel(), size)
        return AllOf([self._gather(rows[:, at : at + size], flat[at : at + size]) for at in starts])

    def _gather(self, rows: Tensor, flat: Tensor) -> Work:
        stages = self._next(flat.numel(), flat.dtype)

        def share() -> None:
            for row, stage in zip(rows, stages, strict=True):
                row.copy_(stage)

        what = described("all_gather", flat)
        prepare = partial(stages[self._rank].copy_, flat)
        return self._turns.submit(*what, prepare=prepare, share=share, alone=True)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> Work:
        """Combine `flat`, [ranks * n]; this rank's slice goes into `out`, [n]."""
        rows = flat.view(self._world_size, -1)
        size = STAGE_BYTES // flat.element_size() // self._world_size
        starts = range(0, out.numel(), size)
        return AllOf(
            [self._scatter(out[at : at + size], rows[:, at : at + size], op) for at in starts]
        )

    def _scatter(self, out: Tensor, rows: Tensor, op: ReduceOp) -> Work:
        stages = [stage.view(rows.shape) for stage in self._next(rows.numel(), rows.dtype)]

        def share() -> None:
            operands = [stage[self._rank] for stage in stages]
            operands[self._rank] = rows[self._rank]
            reduce_into(out, operands, op)

        return self._turns.submit(
            *described("reduce_scatter", out, op),
            prepare=lambda: stages[self._rank].copy_(rows),
            share=share,
            alone=True,
        )

    def _next(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's buffer for the next turn, [numel]; see [Note: Two buffers in turn]."""
        self._half = 1 - self._half
        return [stage[: numel * dtype.itemsize].view(dtype) for stage in self._halves[self._half]]


def described(
    kind: str, tensor: Tensor, op: ReduceOp = "sum", place: tuple[int, ...] = ()
) -> tuple[str, int]:
    """Description of an operation for messages, and its `signature_of`.

    Args:
        kind: name of the collective.
        tensor: this rank's tensor, flat.
        op: sum, min or max.
        place: other numbers that must be equal: where the tensor lies, or the source rank.
    """
    what = f"{kind} {str(tensor.dtype).removeprefix('torch.')} [{tensor.numel()}]"
    return what, signature_of(what, _OPS.index(op), *place)


def signature_of(what: str, *numbers: int) -> int:
    """A number that is equal on ranks that do the same, in any process."""
    return zlib.crc32(repr((what, numbers)).encode())


def _nothing() -> None:
    """An empty prepare, which keeps turns with buffers in step."""
