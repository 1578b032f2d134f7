"""Collectives built from messages alone: a ring, a tree, two levels.

The ring cuts the tensor into N shards. In N-1 steps of *reduce-scatter*, each rank sends a shard to
its right neighbour and combines the one from its left. In N-1 steps of *all-gather*, the finished
shards go round once more. N = 4, shards a b c d; the shards that each rank sends, [owns]:

    step               rank 0      rank 1      rank 2      rank 3
    reduce-scatter 1   d0          a1          b2          c3
    reduce-scatter 2   c30         d01         a12         b23
    reduce-scatter 3   b230        c301        d012        a123      (d012 = d of ranks 0, 1, 2)
                      [a1230]     [b2301]     [c3012]     [d0123]    rank r owns shard r
    all-gather 1       a           b           c           d
    all-gather 2       d           a           b           c
    all-gather 3       c           d           a           b

Each rank sends 2(N-1)/N of the tensor, which is the least possible, in 2(N-1) consecutive messages
(Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
The ranks sum shard r one after the other in the order r+1, r+2, ..., r, so all ranks get the same
bits; other world sizes get other bits.

[Note: Pieces] A shard travels in pieces: the next one is sent while the last is being added.

    wire       [piece 0][piece 1][piece 2]...
    add                 [piece 0][piece 1]...

This continues across steps: piece 0 of a step needs piece 0 of the step before, which has been
added by then. If a shard is a single piece, it is added first. Pieces change no bits.

All functions work on a contiguous tensor of any shape and length, in place, blocking, without
autograd.
"""

from __future__ import annotations

from itertools import product
from math import ceil

import torch
from torch import Tensor

from gradsync.comm.base import Messenger, ReduceOp, Work

CHUNK_BYTES = 4 << 20
"""Default size of a piece, bytes. Each piece costs the latency of a message: on Gloo over loopback,
pieces of 256 KiB made 16 MiB several times slower, and from 2 MiB on there was no difference."""

COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def ring_all_reduce(
    comm: Messenger,
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    chunk_bytes: int = CHUNK_BYTES,
    reduces: bool = True,
    gathers: bool = True,
) -> None:
    """Combine `tensor` over all ranks, by a ring in rank order; `reduces` and `gathers` choose its
    halves.

    `chunk_bytes` is the largest piece sent at once, equal on all ranks. Sends 2(N-1)/N of the
    tensor per rank; extra memory: two pieces.
    """
    flat, size = _flat(tensor), comm.world_size
    # Rank r sends shard r + shift, and receives shard r + shift - 1.
    steps = [(-1 - i, True) for i in range(size - 1)] if reduces else []
    steps += [(-i, False) for i in range(size - 1)] if gathers else []
    if not steps:
        return
    right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
    largest = ceil(len(flat) / size)
    num_pieces = max(1, ceil(largest * flat.element_size() / chunk_bytes))
    shards = [shard.tensor_split(num_pieces) for shard in flat.tensor_split(size)]
    scratch = flat.new_empty(2, ceil(largest / num_pieces))
    arriving: tuple[Work, Tensor | None, Tensor] | None = None

    def finish() -> None:
        """Wait for the piece on its way, and combine it with this rank's."""
        nonlocal arriving
        if arriving is not None:
            work, received, mine = arriving
            work.wait()
            if received is not None:
                COMBINE[op](received, mine, out=mine)
            arriving = None

    for place, ((shift, combines), piece) in enumerate(product(steps, range(num_pieces))):
        if num_pieces == 1:
            finish()  # [Note: Pieces]: we send it next
        sent = shards[(comm.rank + shift) % size][piece]
        mine = shards[(comm.rank + shift - 1) % size][piece]
        received = scratch[place % 2, : len(mine)] if combines else None
        target = mine if received is None else received
        # Pieces of a shard, [n], the tensor's dtype; overlaps the combining of the piece before.
        work = comm.exchange([(sent, right)], [(target, left)])
        finish()
        arriving = work, received, mine
    finish()


def ring_reduce_scatter(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
    """Run the reduce-scatter half; returns this rank's finished shard, a view [n] into `tensor`.

    It is `tensor_split(world_size)[rank]` of the flat tensor; the other shards hold partial results
    afterwards. Sends (N-1)/N of the tensor per rank.
    """
    ring_all_reduce(comm, tensor, op, gathers=False)
    return _flat(tensor).tensor_split(comm.world_size)[comm.rank]


def ring_all_gather(comm: Messenger, tensor: Tensor) -> None:
    """Run the all-gather half: every rank's shard of `tensor` to all ranks. Sends (N-1)/N of it."""
    ring_all_reduce(comm, tensor, reduces=False)


def tree_reduce(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> None:
    """Combine `tensor` on rank 0, by a binomial tree; others keep partial results.

    In rounds of distance 1, 2, 4, ... the upper rank of each pair sends all of it and is done.
    """
    flat, rank = _flat(tensor), comm.rank
    distance = 1
    while distance < comm.world_size:
        if rank & distance:
            comm.exchange([(flat, rank - distance)], []).wait()
            return
        if rank + distance < comm.world_size:
            other = torch.empty_like(flat)
            comm.exchange([], [(other, rank + distance)]).wait()
            COMBINE[op](flat, other, out=flat)
        distance *= 2


def tree_broadcast(comm: Messenger, tensor: Tensor) -> None:
    """Copy rank 0's `tensor` to all ranks, down the same tree from its root."""
    flat, rank = _flat(tensor), comm.rank
    distance = 1 << (comm.world_size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0 and rank + distance < comm.world_size:
            comm.exchange([(flat, rank + distance)], []).wait()
        elif rank % (2 * distance) == distance:
            comm.exchange([], [(flat, rank - distance)]).wait()


def hierarchical_all_reduce(
    intra: Messenger, inter: Messenger, tensor: Tensor, op: ReduceOp = "sum", *, equal_nodes: bool
) -> None:
    """Combine `tensor` over all nodes.

    Shard-wise, for nodes of equal size n; 2 nodes with 2 ranks, the tensor's shards a and b:

        node 0   rank 0 ─┐ reduce-   ┌ a ─── all-reduce a with rank 2 ─── a ┐ all-    ┌ a b
                 rank 1 ─┘ scatter   └ b ─── all-reduce b with rank 3 ─── b ┘ gather  └ a b
        node 1   ...

    Between M nodes each rank sends 2(M-1)/M of a shard, which is 1/n of the tensor, and all network
    cards of a node work at once. With leaders, for nodes of any size: a binomial tree within each
    node to its first rank, a ring between these leaders, a binomial tree back.

    Args:
        intra: the ranks of this node.
        inter: the ranks of all nodes at this rank's position in their `intra`.
        tensor: same shape and dtype on all ranks.
        op: sum, min or max.
        equal_nodes: whether all nodes have the same number of ranks; chooses shard-wise over
            leaders. Equal on all ranks: pass `Groups.equal_nodes`.
    """
    if equal_nodes:
        shard = ring_reduce_scatter(intra, tensor, op)
        ring_all_reduce(inter, shard, op)
        ring_all_gather(intra, tensor)
        return
    tree_reduce(intra, tensor, op)
    if intra.rank == 0:
        ring_all_reduce(inter, tensor, op)
    tree_broadcast(intra, tensor)


def _flat(tensor: Tensor) -> Tensor:
    """View `tensor` as [n], sharing its memory, without autograd."""
    assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)
