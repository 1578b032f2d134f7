"""Collectives between the ranks of one host, through memory that all of them map.

Tensors from `allocate` are combined in place: every rank sums its slice of all ranks' memory and
writes the sum to all of them. Each byte moves once, at memory speed. Other tensors go through two
small buffers per rank that stay in the cache. In an all-reduce a rank copies in only the slices
that others sum, and copies out only the sums that others computed.

[Note: Two buffers in turn] Data that a rank puts into a buffer in operation n are read by peers
until they have finished n, or (in `take`) until they finish n + 1. A buffer is filled again in
operation n + 2, which begins when all have finished n + 1.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, ReduceOp, Work
from gradsync.comm.p2p_collectives import COMBINE
from gradsync.comm.process_group import AllOf, ProcessGroupCommunicator, Then, draw_channel
from gradsync.comm.shared_memory.ordered_ops import (
    PAGE_BYTES,
    Flags,
    OrderedOp,
    OrderedOps,
    Patience,
)
from gradsync.comm.shared_memory.segment import SharedMemoryError, map_together
from gradsync.comm.values import same_number
from gradsync.core.torch_private import backend_of, timeout_of

log = logging.getLogger("gradsync")

STAGE_BYTES = 2**20
"""Size of each of the two buffers."""
_SMALL_BYTES = 2**14
"""Up to this size every rank sums everything itself: one synchronisation point instead of two."""
_CHUNK_BYTES = 2**18
"""Bytes of one operand's piece: a few of them fit into a core's second-level cache."""
_TIMEOUT_S = 1800.0
Pair = tuple[int, int]
"""(left, right): add operand `right` to operand `left`."""


class SharedMemoryCommunicator:
    """See `Communicator`; made by `share_memory`. For one thread at a time.

    Args:
        base: communicator over the same ranks; carries messages and the setup.
        timeout_s: longest wait for a peer, in seconds.

    Raises:
        SharedMemoryError: on all ranks.
    """

    def __init__(self, base: Communicator, timeout_s: float) -> None:
        self.base = base
        self.rank = base.rank
        self.world_size = base.world_size
        self.exchange = base.exchange
        memories, pids = map_together(base, [PAGE_BYTES + 2 * STAGE_BYTES] * base.world_size)
        self.number = draw_channel(base) + 1
        """Identifies this communicator, equal on all ranks; positive."""
        self.flags = Flags(self.rank, [memory[:PAGE_BYTES] for memory in memories])
        self.patience = Patience(self.rank, pids, timeout_s)
        self.ops = OrderedOps(self.flags, self.patience)
        stages = [memory[PAGE_BYTES:] for memory in memories]
        self._halves = [[stage[:STAGE_BYTES] for stage in stages]]
        self._halves.append([stage[STAGE_BYTES:] for stage in stages])
        self._half = 0
        self._regions: list[tuple[int, list[Tensor]]] = []
        """Number of an allocation, equal on all ranks, and every rank's part."""
        self._num_regions = 0
        # Needed even if `close` is never called: peers may be waiting, and descriptors are open.
        self._leave = weakref.finalize(self, _leave, self.flags, self.patience, os.getpid())

    # -- memory

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, [numel], in shared memory; all ranks call it, with equal arguments.
        SharedMemoryError on all of them if too little memory is available."""
        memories, _ = map_together(self.base, [numel * dtype.itemsize] * self.world_size)
        parts = [memory.view(dtype) for memory in memories]
        self._regions.append((self._num_regions, parts))
        self._num_regions += 1
        return parts[self.rank]

    def allocate_once(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, [numel], the same memory on all ranks; as `allocate`."""
        sizes = [numel * dtype.itemsize] + [0] * (self.world_size - 1)
        return map_together(self.base, sizes)[0][0].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Forget a tensor from `allocate`; its memory is freed with the last view."""
        start = tensor.data_ptr()
        self._regions = [r for r in self._regions if r[1][self.rank].data_ptr() != start]

    def parts_of(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's counterpart of `tensor`, a contiguous view of allocated memory, each
        [tensor.numel()]; None if it lies elsewhere."""
        return None if (found := self._placed(tensor)) is None else found[0]

    def _placed(self, tensor: Tensor) -> tuple[list[Tensor], tuple[int, int]] | None:
        """`parts_of`, and the place as numbers; equal numbers mean the same place on all ranks."""
        for number, parts in self._regions:
            mine = parts[self.rank]
            offset, rest = divmod(tensor.data_ptr() - mine.data_ptr(), mine.element_size())
            inside = 0 <= offset <= mine.numel() - tensor.numel() and not rest
            if inside and tensor.dtype == mine.dtype and tensor.is_contiguous():
                here = slice(offset, offset + tensor.numel())
                return [part[here] for part in parts], (number, offset)
        return None

    # -- shares of work

    def run(self, share: Callable[[], object], what: str) -> Work:
        """Run `share` on each rank once all ranks have called `run`; done when all have finished.

        In the share, any rank may read data written before `run`, but not touch what another rank's
        share writes. After `wait`, any rank may read data written in the share. Ranks that run
        another operation, by its name `what`, at the same time raise an error.
        """
        return self.ops.submit(OrderedOp(what, share=share))

    # -- collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        flat, home = _flat(tensor)
        placed = None if home is not None else self._placed(tensor)
        if placed is None:
            if flat.numel() * flat.element_size() <= _SMALL_BYTES:
                return _home(self._small(flat, op), flat, home)
            size = STAGE_BYTES // flat.element_size()
            return _home(AllOf([self._large(piece, op) for piece in flat.split(size)]), flat, home)
        parts, place = placed
        mine = even_parts(flat.numel(), self.world_size)[self.rank]
        operands, pairs = [part[mine] for part in parts], pairs_of_tree(self.world_size)
        share = partial(reduce_in_place, operands, pairs, 0, operands, op)
        return self.ops.submit(_op("all_reduce", flat, (op, place), share=share))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        flat, home = _flat(tensor)
        here, works = self.rank == src, []
        for piece in flat.split(STAGE_BYTES // flat.element_size()):
            stage = self._next(piece)[src]
            # Without a preparation a rank would arrive before its peers are done with the buffers.
            prepare = partial(stage.copy_, piece) if here else lambda: None
            share = None if here else partial(piece.copy_, stage)
            op = _op("broadcast", piece, (src,), prepare, share, alone=True)
            works.append(self.ops.submit(op))
        return _home(AllOf(works), flat, home)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        out, home = _flat(output)
        flat = _flat(tensor)[0]
        assert out.numel() == self.world_size * flat.numel(), (out.shape, flat.shape)
        size = STAGE_BYTES // flat.element_size()
        pieces = zip(out.view(self.world_size, -1).split(size, 1), flat.split(size), strict=True)
        works = [self._gather(rows, piece) for rows, piece in pieces if piece.numel()]
        return _home(AllOf(works), out, home)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        out, home = _flat(output)
        flat = _flat(tensor)[0]
        assert flat.numel() == self.world_size * out.numel(), (out.shape, flat.shape)
        size = STAGE_BYTES // flat.element_size() // self.world_size
        pieces = zip(out.split(size), flat.view(self.world_size, -1).split(size, 1), strict=True)
        works = [self._scatter(piece, rows, op) for piece, rows in pieces if piece.numel()]
        return _home(AllOf(works), out, home)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.ops.submit(OrderedOp("barrier", alone=True)).wait()

    def close(self) -> None:
        """Leave the communicator for good, and notify peers that wait for this rank."""
        self._leave()
        self.ops.close()
        self._regions.clear()

    # -- tensors in private memory, flat, a piece at a time through the buffers

    def _next(self, like: Tensor) -> list[Tensor]:
        """Each rank's buffer for the next operation, [numel]; see [Note: Two buffers in turn]."""
        self._half = 1 - self._half
        size = like.numel() * like.element_size()
        return [stage[:size].view(like.dtype) for stage in self._halves[self._half]]

    def _small(self, flat: Tensor, op: ReduceOp) -> Work:
        stages = self._next(flat)
        prepare = partial(stages[self.rank].copy_, flat)
        share = partial(reduce_into, flat, stages, op)
        return self.ops.submit(_op("all_reduce", flat, (op,), prepare, share, alone=True))

    def _large(self, flat: Tensor, op: ReduceOp) -> Work:
        stages, me = self._next(flat), self.rank
        parts = even_parts(flat.numel(), self.world_size)
        mine = parts[me]
        others = [(rank, part) for rank, part in enumerate(parts) if rank != me]

        def prepare() -> None:
            for _, part in others:
                stages[me][part].copy_(flat[part])

        def share() -> None:
            operands = [stage[mine] for stage in stages]
            operands[me] = flat[mine]
            reduce_into(stages[me][mine], operands, op)
            flat[mine].copy_(stages[me][mine])

        def take() -> None:
            for rank, part in others:
                flat[part].copy_(stages[rank][part])

        return self.ops.submit(_op("all_reduce", flat, (op,), prepare, share, take))

    def _gather(self, rows: Tensor, flat: Tensor) -> Work:
        stages = self._next(flat)

        def share() -> None:
            for row, stage in zip(rows, stages, strict=True):
                row.copy_(stage)

        prepare = partial(stages[self.rank].copy_, flat)
        return self.ops.submit(_op("all_gather", flat, (), prepare, share, alone=True))

    def _scatter(self, out: Tensor, rows: Tensor, op: ReduceOp) -> Work:
        stages, me = [stage.view(rows.shape) for stage in self._next(rows)], self.rank

        def share() -> None:
            operands = [stage[me] for stage in stages]
            operands[me] = rows[me]
            reduce_into(out, operands, op)

        prepare = partial(stages[me].copy_, rows)
        return self.ops.submit(_op("reduce_scatter", out, (op,), prepare, share, alone=True))


def _op(kind: str, flat: Tensor, key: tuple[object, ...], *actions: Any, **named: Any) -> OrderedOp:
    """An operation on `flat`; the rest are fields of `OrderedOp`."""
    what = f"{kind} {str(flat.dtype).removeprefix('torch.')} [{flat.numel()}]"
    return OrderedOp(what, key, *actions, **named)


def _leave(flags: Flags, patience: Patience, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the pages too, and is not a rank
        flags.leave()
        patience.close()


def _flat(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """`tensor` as [n] plain numbers, and `tensor` itself if those are a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.reshape(-1)
    return flat, tensor if flat.data_ptr() != tensor.data_ptr() and tensor.numel() else None


def _home(work: Work, flat: Tensor, home: Tensor | None) -> Work:
    """`work` on `flat`, copied back to `home` if `flat` is a copy."""
    return work if home is None else Then(work, lambda: home.copy_(flat.view(home.shape)))


def pairs_of_tree(count: int) -> list[Pair]:
    """A balanced tree over `count` operands; the result is in operand 0."""
    pairs, distance = [], 1
    while distance < count:
        pairs += [(i, i + distance) for i in range(0, count - distance, 2 * distance)]
        distance *= 2
    return pairs


def reduce_in_place(
    operands: Sequence[Tensor],
    pairs: Sequence[Pair],
    end: int,
    copies: Sequence[Tensor],
    op: ReduceOp = "sum",
) -> None:
    """Combine `operands`, each [n], along `pairs`; the result in operand `end` goes to `copies`.

    Operands are overwritten. A copy may be one of the operands.

    Args:
        operands: same length and dtype.
        pairs: (left, right) in a valid order of execution.
        end: index of the operand with the result; -1: no result, copies become zeros.
        copies: each [n]; a copy that shares `operands[end]`'s memory is left alone.
        op: sum, min or max.
    """
    if end < 0:
        for copy in copies:
            copy.zero_()
        return
    result = operands[end]
    targets = [copy for copy in copies if copy.data_ptr() != result.data_ptr()]
    for here in _chunks(result):
        parts = [operand[here] for operand in operands]
        for left, right in pairs:
            COMBINE[op](parts[left], parts[right], out=parts[left])
        for target in targets:
            target[here].copy_(parts[end])


def reduce_into(out: Tensor, operands: Sequence[Tensor], op: ReduceOp = "sum") -> None:
    """Combine `operands`, each [n], along a balanced tree into `out`, [n]; they keep their
    values."""
    if len(operands) == 1:
        out.copy_(operands[0])
        return
    for here in _chunks(out):
        parts = [operand[here] for operand in operands]
        while len(parts) > 2:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [COMBINE[op](*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        COMBINE[op](*parts, out=out[here])


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Slices of at most `_CHUNK_BYTES` that cover `flat`."""
    size = _CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), size):
        yield slice(start, min(start + size, flat.numel()))


def even_parts(numel: int, world_size: int) -> list[slice]:
    """One slice of [numel] per rank, cut at multiples of 64 elements: one writer per cache line."""
    blocks = -(-numel // 64)
    edges = [min(blocks * rank // world_size * 64, numel) for rank in range(world_size + 1)]
    return [slice(edges[rank], edges[rank + 1]) for rank in range(world_size)]


def share_memory(base: Communicator) -> SharedMemoryCommunicator:
    """Make a communicator over the ranks of `base` through shared memory; all ranks call it.

    Raises:
        SharedMemoryError: on all ranks, if they are not on one host or shared memory is not
            available; the message says why and what to do.
    """
    # The same on all ranks of a host; ranks of different hosts differ in what `base` tells them.
    if sys.platform != "linux":
        raise SharedMemoryError("no shared memory: it needs Linux")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SharedMemoryError(
            f"no shared memory on {platform.machine()}: only x86-64 processors keep the order of "
            "writes that it relies on"
        )
    group = getattr(base, "group", None)
    timeout_s = _TIMEOUT_S if group is None else timeout_of(group).total_seconds()
    return SharedMemoryCommunicator(base, timeout_s)


def fastest(
    base: Communicator, device: torch.device, present: Iterable[SharedMemoryCommunicator] = ()
) -> Communicator:
    """Return shared memory instead of `base` if possible: CPU ranks of one host, over gloo. All
    ranks call it.

    Of the communicators in `present`, made earlier, the last one over the same group is reused if
    all ranks still have it. This detects models that ranks use in different orders: on separate
    communicators they would wait for each other.
    """
    is_group = isinstance(base, ProcessGroupCommunicator)
    if not is_group or device.type != "cpu" or base.world_size == 1:
        return base
    # Ranks drop communicators, and notice a broken one, at different times.
    over = [c for c in present if getattr(c.base, "group", None) is base.group and not c.ops.broken]
    number = over[-1].number if over else 0  # numbers are random, without order
    if same_number(base, number) and number:
        return over[-1]
    try:
        shared = share_memory(base)
    except SharedMemoryError as error:
        if base.rank == 0:
            log.info("collectives by %s: %s", backend_of(base.group, device).name(), str(error))
        return base
    if base.rank == 0:
        log.info("collectives through shared memory: all %d ranks are on one host", base.world_size)
    return shared
