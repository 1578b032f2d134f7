"""Collectives of the ranks of one host through memory that all of them map.

Tensors from `allocate` are combined where they lie: every rank adds up its part over all ranks'
memory and writes the sum into all of them. Each byte moves once, at the memory's own speed. Other
tensors go through small buffers that stay in the cache.

[Note: Two buffers in turn] What a rank lays out in a buffer in turn n peers read until they have
finished turn n, or (in `take`) until they finish n + 1. A buffer is filled again in turn n + 2,
which begins when all have finished n + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import AllOf, Communicator, Done, ReduceOp, Work
from gradsync.comm.process_group import CopyBack
from gradsync.comm.shared_memory.arena import (
    Region,
    allocate,
    allocate_once,
    map_together,
)
from gradsync.comm.shared_memory.flags import PAGE_BYTES, Flags
from gradsync.comm.shared_memory.kernels import (
    even_parts,
    pairs_of_tree,
    reduce_in_place,
    reduce_into,
)
from gradsync.comm.shared_memory.turns import Turns
from gradsync.comm.shared_memory.waiting import Patience

if TYPE_CHECKING:
    from torch import Tensor

STAGE_BYTES = 2**20
"""Of each of the two buffers through which other tensors go."""
_SMALL_BYTES = 2**14
"""Up to here every rank adds everything by itself: one meeting instead of two."""
_KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "run")
_OPS = ("sum", "min", "max")


class SharedMemoryCommunicator:
    """See `Communicator`; made by `share_memory`. For one thread at a time.

    Args:
        base: the same ranks; carries messages, tensors that are not on the CPU, and what is needed
            to meet.
        timeout_s: longest wait for a peer, seconds.

    Raises:
        SharedMemoryError: on all ranks.
    """

    def __init__(self, base: Communicator, timeout_s: float) -> None:
        self.base = base
        self.rank = base.rank
        self.world_size = base.world_size
        memories, pids = map_together(base, [PAGE_BYTES + 2 * STAGE_BYTES] * base.world_size)
        self._flags = Flags(self.rank, [memory[:PAGE_BYTES] for memory in memories])
        self._patience = Patience(self.rank, pids, timeout_s)
        self._turns = Turns(self._flags, self._patience)
        self._stages = [
            [m[PAGE_BYTES:][h * STAGE_BYTES :][:STAGE_BYTES] for m in memories] for h in (0, 1)
        ]
        self._half = 0
        self._regions: list[Region] = []

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, [numel], in memory that all ranks share; all ranks call it, with equal arguments.

        Raises:
            SharedMemoryError: there is not so much memory.
        """
        region = allocate(self.base, numel, dtype)
        self._regions.append(region)
        return region.mine

    def allocate_once(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, [numel], the same memory on all ranks; they call it with equal arguments.

        Raises:
            SharedMemoryError: there is not so much memory.
        """
        return allocate_once(self.base, numel, dtype)

    def release(self, tensor: Tensor) -> None:
        """Forget what `allocate` returned; its memory goes when no view of it is left."""
        self._regions = [r for r in self._regions if r.mine.data_ptr() != tensor.data_ptr()]

    def parts_of(self, tensor: Tensor) -> list[Tensor] | None:
        """What every rank has in the place of `tensor`, a contiguous view of allocated memory, each
        [tensor.numel()]; None if it is elsewhere."""
        for region in self._regions:
            offset = region.offset_of(tensor)
            if offset is not None:
                return [part[offset : offset + tensor.numel()] for part in region.parts]
        return None

    # -- a share of one's own ---------------------------------------------------------------------

    def run(self, share: Callable[[], object], signature: int = 0) -> Work:
        """All ranks come, each runs its `share`, all have finished when the work is done.

        What was written before `run` may be read in the share, by any rank; what was written in
        the share may be read after `wait`. In a share no rank may touch what another's writes.
        """
        return self._turns.submit("run", self._signature("run", 0, signature), share=share)

    def note(self, values: Sequence[int]) -> None:
        """Leave up to 8 numbers, which peers may read in the share of the next operation."""
        self._flags.note(values)

    def notes(self, count: int) -> list[list[int]]:
        """The first `count` numbers that every rank left."""
        return self._flags.notes(count)

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        if tensor.device.type != "cpu":
            return self.base.all_reduce(tensor, op)
        if op != "sum" and tensor.is_complex():
            raise ValueError(f"there is no {op} of complex numbers")
        flat, home = _flat(tensor)
        parts = None if home is not None else self.parts_of(tensor)
        if parts is not None:
            work = self._all_reduce_in_place(parts, op)
        elif flat.numel() * flat.element_size() <= _SMALL_BYTES:
            work = self._all_reduce_small(flat, op)
        else:
            work = self._chunked(flat, 1, lambda piece: self._all_reduce_staged(piece, op))
        return work if home is None else CopyBack(work, flat.view(home.shape), home)

    def _all_reduce_in_place(self, parts: list[Tensor], op: ReduceOp) -> Work:
        mine = even_parts(parts[0].numel(), self.world_size)[self.rank]
        operands = [part[mine] for part in parts]
        share = partial(reduce_in_place, operands, pairs_of_tree(self.world_size), 0, operands, op)
        return self._submit("all_reduce", parts[self.rank], op, share=share)

    def _all_reduce_small(self, flat: Tensor, op: ReduceOp) -> Work:
        stages = self._stage(flat.numel(), flat.dtype)
        return self._submit(
            *("all_reduce", flat, op),
            prepare=lambda: stages[self.rank].copy_(flat),
            share=lambda: reduce_into(flat, stages, op),
            alone=True,
        )

    def _all_reduce_staged(self, flat: Tensor, op: ReduceOp) -> Work:
        """What others add is copied in, what they have added is copied out."""
        stages = self._stage(flat.numel(), flat.dtype)
        parts = even_parts(flat.numel(), self.world_size)
        mine = parts[self.rank]
        others = [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]

        def prepare() -> None:
            for _, part in others:
                stages[self.rank][part].copy_(flat[part])

        def share() -> None:
            operands = [stage[mine] for stage in stages]
            operands[self.rank] = flat[mine]
            reduce_into(stages[self.rank][mine], operands, op)
            flat[mine].copy_(stages[self.rank][mine])

        def take() -> None:
            for rank, part in others:
                flat[part].copy_(stages[rank][part])

        return self._submit("all_reduce", flat, op, prepare=prepare, share=share, take=take)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        if tensor.device.type != "cpu":
            return self.base.broadcast(tensor, src)
        flat, home = _flat(tensor)
        work = self._chunked(flat, 1, lambda piece: self._broadcast(piece, src))
        return work if home is None else CopyBack(work, flat.view(home.shape), home)

    def _broadcast(self, flat: Tensor, src: int) -> Work:
        stage = self._stage(flat.numel(), flat.dtype)[src]
        here = self.rank == src
        return self._submit(
            *("broadcast", flat),
            prepare=(lambda: stage.copy_(flat)) if here else _nothing,
            share=None if here else lambda: flat.copy_(stage),
            alone=True,
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        if tensor.device.type != "cpu":
            return self.base.all_gather(output, tensor)
        _check_lengths(output, tensor, self.world_size)
        flat, _ = _flat(tensor)
        out, home = _flat(output)
        rows = out.view(self.world_size, -1)

        def gather(piece: Tensor, start: int) -> Work:
            stages = self._stage(piece.numel(), piece.dtype)
            columns = rows[:, start : start + piece.numel()]

            def share() -> None:
                for row, stage in zip(columns, stages, strict=True):
                    row.copy_(stage)

            prepare = partial(stages[self.rank].copy_, piece)
            return self._submit("all_gather", piece, prepare=prepare, share=share, alone=True)

        size = STAGE_BYTES // flat.element_size()
        pieces = [(flat[start : start + size], start) for start in range(0, flat.numel(), size)]
        work = AllOf([gather(*piece) for piece in pieces])
        return work if home is None else CopyBack(work, out.view(home.shape), home)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        if tensor.device.type != "cpu":
            return self.base.reduce_scatter(output, tensor, op)
        _check_lengths(tensor, output, self.world_size)
        flat, copied = _flat(tensor)
        out, home = _flat(output)
        parts = None if copied is not None else self.parts_of(tensor)
        work: Work
        if parts is not None:
            mine = slice(self.rank * out.numel(), (self.rank + 1) * out.numel())
            share = partial(reduce_into, out, [part[mine] for part in parts], op)
            work = self._submit("reduce_scatter", flat, op, share=share)
        else:
            rows = flat.view(self.world_size, -1)
            size = STAGE_BYTES // flat.element_size() // self.world_size
            work = AllOf(
                [
                    self._reduce_scatter(
                        out[start : start + size], rows[:, start : start + size], op
                    )
                    for start in range(0, out.numel(), size)
                ]
            )
        return work if home is None else CopyBack(work, out.view(home.shape), home)

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: ReduceOp) -> Work:
        stages = [stage.view(rows.shape) for stage in self._stage(rows.numel(), rows.dtype)]

        def share() -> None:
            operands = [stage[self.rank] for stage in stages]
            operands[self.rank] = rows[self.rank]
            reduce_into(out, operands, op)

        return self._submit(
            *("reduce_scatter", out, op),
            prepare=lambda: stages[self.rank].copy_(rows),
            share=share,
            alone=True,
        )

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._turns.submit("barrier", self._signature("barrier", 0), alone=True).wait()

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Messenger.exchange`; by `base`, from any thread."""
        return self.base.exchange(sends, receives, channel)

    def close(self) -> None:
        """Take part in nothing any more; peers that wait for this rank are told."""
        self._flags.leave()
        self._patience.close()
        self._regions.clear()

    # -- how --------------------------------------------------------------------------------------

    def _stage(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's buffer for the next turn, [numel]; see [Note: Two buffers in turn]."""
        self._half = 1 - self._half
        return [stage[: numel * dtype.itemsize].view(dtype) for stage in self._stages[self._half]]

    def _chunked(self, flat: Tensor, rows: int, run: Callable[[Tensor], Work]) -> Work:
        size = STAGE_BYTES // flat.element_size() // rows
        if flat.numel() <= size:
            return run(flat) if flat.numel() else Done()
        return AllOf([run(piece) for piece in flat.split(size)])

    def _submit(self, kind: str, tensor: Tensor, op: ReduceOp = "sum", **actions: object) -> Work:
        signature = self._signature(kind, tensor.numel(), _OPS.index(op), tensor.element_size())
        what = f"{kind} {str(tensor.dtype).removeprefix('torch.')} [{tensor.numel()}]"
        return self._turns.submit(what, signature, **actions)  # type: ignore[arg-type]

    @staticmethod
    def _signature(kind: str, *numbers: int) -> int:
        signature = _KINDS.index(kind) + 1
        for number in numbers:
            signature = signature * 1_000_003 + number
        return signature


def _flat(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """`tensor` as [n] plain numbers, and `tensor` itself where that had to be a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.reshape(-1)
    return flat, tensor if flat.data_ptr() != tensor.data_ptr() and tensor.numel() else None


def _check_lengths(whole: Tensor, part: Tensor, world_size: int) -> None:
    if whole.numel() != part.numel() * world_size or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole tensor must be {world_size} times the part, of the same dtype; got "
            f"{whole.dtype} {tuple(whole.shape)} and {part.dtype} {tuple(part.shape)}"
        )


def _nothing() -> None:
    """A prepare that keeps turns with buffers in step."""
