"""Collectives of the ranks of one host through memory that all of them map.

Tensors from `allocate` are combined in place: every rank adds up its slice of all ranks' memory and
writes the sum into all of them. Each byte moves once, at the memory's own speed. Other tensors go
through small buffers that stay in the cache.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator, ReduceOp, Work
from gradsync.comm.channel import draw_channel
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
from gradsync.comm.shared_memory.staging import STAGE_BYTES, Staging, described, signature_of
from gradsync.comm.shared_memory.turns import Turns
from gradsync.comm.shared_memory.waiting import Patience

if TYPE_CHECKING:
    from torch import Tensor


class SharedMemoryCommunicator:
    """See `Communicator`; made by `share_memory`. For one thread at a time.

    Args:
        base: communicator over the same ranks; carries messages, tensors that are not on the CPU,
            and the setup.
        timeout_s: longest wait for a peer, in seconds.

    Raises:
        SharedMemoryError: on all ranks.
    """

    def __init__(self, base: Communicator, timeout_s: float) -> None:
        self.base = base
        self.rank = base.rank
        self.world_size = base.world_size
        memories, pids = map_together(base, [PAGE_BYTES + 2 * STAGE_BYTES] * base.world_size)
        self.number = draw_channel(base) + 1
        """Identifies this communicator, equal on all ranks; positive."""
        self._flags = Flags(self.rank, [memory[:PAGE_BYTES] for memory in memories])
        self._patience = Patience(self.rank, pids, timeout_s)
        self._turns = Turns(self._flags, self._patience)
        self._staging = Staging(self.rank, [m[PAGE_BYTES:] for m in memories], self._turns)
        self._regions: list[Region] = []
        self._num_regions = 0
        # Also when `close` is never called: peers may be waiting, and descriptors are open.
        self._leave = weakref.finalize(self, _leave, self._flags, self._patience, os.getpid())

    @property
    def timeout_s(self) -> float:
        """Longest wait for a peer, in seconds; may be changed while another thread waits."""
        return self._patience.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        """See the property."""
        self._patience.timeout_s = seconds

    @property
    def is_open(self) -> bool:
        """False once closed or broken by a failed operation; peers may notice later."""
        return self._turns.is_open

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, [numel], in shared memory; all ranks call it, with equal arguments.

        Raises:
            SharedMemoryError: too little memory is available.
        """
        region = allocate(self.base, numel, dtype, self._num_regions)
        self._num_regions += 1
        self._regions.append(region)
        return region.mine

    def allocate_once(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, [numel], the same memory on all ranks; all call it with equal arguments.

        Raises:
            SharedMemoryError: too little memory is available.
        """
        return allocate_once(self.base, numel, dtype)

    def release(self, tensor: Tensor) -> None:
        """Forget what `allocate` returned; its memory is freed when no view of it is left."""
        self._regions = [r for r in self._regions if r.mine.data_ptr() != tensor.data_ptr()]

    def parts_of(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's counterpart of `tensor`, a contiguous view of allocated memory, each
        [tensor.numel()]; None if it lies elsewhere."""
        return None if (found := self._placed(tensor)) is None else found[0]

    def _placed(self, tensor: Tensor) -> tuple[list[Tensor], tuple[int, int]] | None:
        """`parts_of`, and the place as numbers that are equal on ranks that mean the same place."""
        for region in self._regions:
            offset = region.offset_of(tensor)
            if offset is not None:
                here = slice(offset, offset + tensor.numel())
                return [part[here] for part in region.parts], (region.number, offset)
        return None

    # -- shares of work ---------------------------------------------------------------------------

    def run(self, share: Callable[[], object], what: str, over: Tensor | None = None) -> Work:
        """Run `share` on each rank once all ranks have called; done when all have finished.

        Data written before `run` may be read in the share, by any rank; data written in the share
        may be read after `wait`. In a share no rank may touch what another rank's share writes.

        Args:
            share: this rank's part.
            what: name of the operation; an error on ranks that run another one at the same time.
            over: memory from `allocate` that the shares work on, if any.
        """
        place: tuple[int, ...] = ()
        if over is not None and (placed := self._placed(over)) is not None:
            place = (over.numel(), *placed[1])
        return self._turns.submit(what, signature_of(what, *place), share=share)

    def note(self, values: Sequence[int]) -> None:
        """Publish up to 8 numbers, which peers may read in the share of the next operation."""
        self._flags.note(values)

    def notes(self, count: int) -> list[list[int]]:
        """The first `count` numbers published by every rank."""
        return self._flags.notes(count)

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        if tensor.device.type != "cpu":
            return self.base.all_reduce(tensor, op)
        if op != "sum" and tensor.is_complex():
            raise ValueError(f"there is no {op} of complex numbers")
        flat, home = _flat(_writable(tensor))
        placed = None if home is not None else self._placed(tensor)
        if placed is None:
            return _home(self._staging.all_reduce(flat, op), flat, home)
        parts, place = placed
        mine = even_parts(flat.numel(), self.world_size)[self.rank]
        operands, pairs = [part[mine] for part in parts], pairs_of_tree(self.world_size)
        share = partial(reduce_in_place, operands, pairs, 0, operands, op)
        return self._turns.submit(*described("all_reduce", flat, op, place), share=share)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        if tensor.device.type != "cpu":
            return self.base.broadcast(tensor, src)
        flat, home = _flat(_writable(tensor))
        return _home(self._staging.broadcast(flat, src), flat, home)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        if tensor.device.type != "cpu":
            return self.base.all_gather(output, tensor)
        _check_lengths(output, tensor, self.world_size)
        out, home = _flat(_writable(output))
        return _home(self._staging.all_gather(out, _flat(tensor)[0]), out, home)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        if tensor.device.type != "cpu":
            return self.base.reduce_scatter(output, tensor, op)
        _check_lengths(tensor, output, self.world_size)
        flat, copied = _flat(tensor)
        out, home = _flat(_writable(output))
        placed = None if copied is not None else self._placed(tensor)
        if placed is None:
            return _home(self._staging.reduce_scatter(out, flat, op), out, home)
        parts, place = placed
        mine = slice(self.rank * out.numel(), (self.rank + 1) * out.numel())
        share = partial(reduce_into, out, [part[mine] for part in parts], op)
        work = self._turns.submit(*described("reduce_scatter", flat, op, place), share=share)
        return _home(work, out, home)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._turns.submit("barrier", _BARRIER, alone=True).wait()

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        channel: int = 0,
        /,
    ) -> Work:
        """See `Messenger.exchange`; through `base`, from any thread."""
        return self.base.exchange(sends, receives, channel)

    def close(self) -> None:
        """Leave the communicator for good; peers that wait for this rank are told."""
        self._leave()
        self._turns.close()
        self._regions.clear()


_BARRIER = signature_of("barrier")


def _leave(flags: Flags, patience: Patience, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the pages too, and is not a rank
        flags.leave()
        patience.close()


def _flat(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """`tensor` as [n] plain numbers, and `tensor` itself where that had to be a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.reshape(-1)
    return flat, tensor if flat.data_ptr() != tensor.data_ptr() and tensor.numel() else None


def _writable(tensor: Tensor) -> Tensor:
    """`tensor`, after a check that no two of its elements share memory."""
    if tensor.is_contiguous():
        return tensor
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"elements of a tensor {tuple(tensor.shape)} lie in one place (strides "
            f"{tensor.stride()}, as `expand` makes them); clone() it first"
        )
    return tensor


def _home(work: Work, flat: Tensor, home: Tensor | None) -> Work:
    """`work` on `flat`, copied back to `home` where `flat` is a copy."""
    return work if home is None else CopyBack(work, flat.view(home.shape), home)


def _check_lengths(whole: Tensor, part: Tensor, world_size: int) -> None:
    if whole.numel() != part.numel() * world_size or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole tensor must be {world_size} times the part, of the same dtype; got "
            f"{whole.dtype} {tuple(whole.shape)} and {part.dtype} {tuple(part.shape)}"
        )
