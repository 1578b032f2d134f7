"""All-reduce on a ring: every rank talks to its two neighbours only.

The tensor is cut into N shards. First N-1 steps of *reduce-scatter*: each rank sends a shard to its
right neighbour and combines the one from its left. Then N-1 steps of *all-gather*: the finished
shards go round once more. N = 4, shards a b c d; the shards that each rank sends, and [owns]:

    step               rank 0      rank 1      rank 2      rank 3
    reduce-scatter 1   d0          a1          b2          c3
    reduce-scatter 2   c30         d01         a12         b23
    reduce-scatter 3   b230        c301        d012        a123      (d012 = d of ranks 0, 1, 2)
                      [a1230]     [b2301]     [c3012]     [d0123]    rank r owns shard r
    all-gather 1       a           b           c           d
    all-gather 2       d           a           b           c
    all-gather 3       c           d           a           b

Each rank sends every shard twice except two, each once: 2(N-1)/N of the tensor, which is the least
possible, in 2(N-1) consecutive messages (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations"). Shard r is summed by one rank after the other in the
order r+1, r+2, ..., r, so all ranks get the same bits; other world sizes get other bits.

[Note: Pieces] A shard travels in pieces: the next one is on its way while the last is being added.

    wire       [piece 0][piece 1][piece 2]...
    add                 [piece 0][piece 1]...

This continues across steps: piece 0 of a step needs piece 0 of the step before, which has been
added by then, unless a shard is a single piece: then it is added first. Pieces change no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from gradsync.comm.base import Messenger, ReduceOp, Work
from gradsync.comm.combine import combine, flat_view
from gradsync.comm.shares import share

CHUNK_BYTES = 4 << 20
"""Default size of a piece, bytes. Each costs a message's latency: on Gloo over loopback, pieces of
256 KiB made 16 MiB several times slower, and from 2 MiB on there was no difference."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: the shard sent to the right, and the one received from the left."""

    sent: int
    received: int
    combines: bool
    """True in reduce-scatter, False in all-gather."""


def reduce_scatter_steps(rank: int, world_size: int) -> list[Step]:
    """N-1 steps after which rank r owns shard r."""
    return [
        Step((rank - 1 - i) % world_size, (rank - 2 - i) % world_size, combines=True)
        for i in range(world_size - 1)
    ]


def all_gather_steps(rank: int, world_size: int) -> list[Step]:
    """N-1 steps that begin where rank r owns shard r."""
    return [
        Step((rank - i) % world_size, (rank - 1 - i) % world_size, combines=False)
        for i in range(world_size - 1)
    ]


def ring_all_reduce(
    comm: Messenger, tensor: Tensor, op: ReduceOp = "sum", *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Combine `tensor` (contiguous, any shape and length) over all ranks, in place, blocking.

    Sends 2(N-1)/N of the tensor per rank; extra memory: two pieces.

    Args:
        comm: whose ranks are the ring, in rank order.
        tensor: same shape and dtype on all ranks.
        op: sum, min or max.
        chunk_bytes: largest piece sent at once, bytes; equal on all ranks.
    """
    rank, world_size = comm.rank, comm.world_size
    steps = reduce_scatter_steps(rank, world_size) + all_gather_steps(rank, world_size)
    _run(comm, tensor, op, steps, chunk_bytes)


def ring_reduce_scatter(
    comm: Messenger, tensor: Tensor, op: ReduceOp = "sum", *, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Run the reduce-scatter half; returns this rank's finished shard, a view [n] into `tensor`.

    Its elements are `shares.share(length, world_size, rank)`; the others hold partial results
    afterwards. Sends (N-1)/N of the tensor per rank.

    Args:
        comm, tensor, op, chunk_bytes: as in `ring_all_reduce`.
    """
    _run(comm, tensor, op, reduce_scatter_steps(comm.rank, comm.world_size), chunk_bytes)
    flat = flat_view(tensor)
    start, end = share(len(flat), comm.world_size, comm.rank)
    return flat[start:end]


def ring_all_gather(comm: Messenger, tensor: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Run the all-gather half: every rank's shard of `tensor` to all ranks, in place.

    Sends (N-1)/N of the tensor per rank.

    Args:
        comm, tensor, chunk_bytes: as in `ring_all_reduce`.
    """
    _run(comm, tensor, "sum", all_gather_steps(comm.rank, comm.world_size), chunk_bytes)


def _run(
    comm: Messenger, tensor: Tensor, op: ReduceOp, steps: Sequence[Step], chunk_bytes: int
) -> None:
    assert chunk_bytes > 0, chunk_bytes
    flat = flat_view(tensor)
    if not steps:
        return
    world_size = comm.world_size
    largest = ceil(len(flat) / world_size)
    num_pieces = max(1, ceil(largest * flat.element_size() / chunk_bytes))
    scratch = flat.new_empty(2, ceil(largest / num_pieces))
    under_way: _Piece | None = None
    for i, (step, piece) in enumerate((s, p) for s in steps for p in range(num_pieces)):
        if num_pieces == 1 and under_way is not None:
            under_way.finish()  # [Note: Pieces]: it is what we send next
            under_way = None
        target = _piece(flat, world_size, step.received, num_pieces, piece)
        buffer = scratch[i % 2, : len(target)] if step.combines else target
        source = _piece(flat, world_size, step.sent, num_pieces, piece)
        # Pieces of a shard, [n], the tensor's dtype; overlaps the combining of the piece before.
        work = comm.exchange(
            [(source, (comm.rank + 1) % world_size)], [(buffer, (comm.rank - 1) % world_size)]
        )
        if under_way is not None:
            under_way.finish()
        under_way = _Piece(work, target, buffer if step.combines else None, op)
    if under_way is not None:
        under_way.finish()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece in transit."""

    work: Work
    target: Tensor
    buffer: Tensor | None
    op: ReduceOp

    def finish(self) -> None:
        """Wait for it, and combine it with this rank's own."""
        self.work.wait()
        if self.buffer is not None:
            combine(self.op, self.buffer, self.target, out=self.target)


def _piece(flat: Tensor, num_shares: int, index: int, num_pieces: int, piece: int) -> Tensor:
    start, end = share(len(flat), num_shares, index)
    first, last = share(end - start, num_pieces, piece)
    return flat[start + first : start + last]
