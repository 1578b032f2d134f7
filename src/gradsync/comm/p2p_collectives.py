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
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Messages, Messenger, ReduceOp, Work
from gradsync.comm.process_group import Done

CHUNK_BYTES = 4 << 20
"""Default size of a piece, bytes. Each piece costs the latency of a message: on Gloo over loopback,
pieces of 256 KiB made 16 MiB several times slower, and from 2 MiB on there was no difference."""

Step = tuple[int, int, bool]
"""The shard sent to the right, the one received from the left, and whether it is combined."""


# -- a ring ---------------------------------------------------------------------------------------


def ring_all_reduce(
    comm: Messenger, tensor: Tensor, op: ReduceOp = "sum", *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Combine `tensor` (contiguous, any shape and length) over all ranks, in place, blocking.

    The ring is in rank order. `chunk_bytes` is the largest piece sent at once, equal on all ranks.
    Sends 2(N-1)/N of the tensor per rank; extra memory: two pieces.
    """
    _run(comm, tensor, op, _reduce_scatter_steps(comm) + _all_gather_steps(comm), chunk_bytes)


def ring_reduce_scatter(
    comm: Messenger, tensor: Tensor, op: ReduceOp = "sum", *, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Run the reduce-scatter half; returns this rank's finished shard, a view [n] into `tensor`.

    It is `tensor_split(world_size)[rank]` of the flat tensor; the other shards hold partial results
    afterwards. Sends (N-1)/N of the tensor per rank. Arguments as in `ring_all_reduce`.
    """
    _run(comm, tensor, op, _reduce_scatter_steps(comm), chunk_bytes)
    return flat_view(tensor).tensor_split(comm.world_size)[comm.rank]


def ring_all_gather(comm: Messenger, tensor: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Run the all-gather half: every rank's shard of `tensor` to all ranks, in place.

    Sends (N-1)/N of the tensor per rank. Arguments as in `ring_all_reduce`.
    """
    _run(comm, tensor, "sum", _all_gather_steps(comm), chunk_bytes)


def _reduce_scatter_steps(comm: Messenger) -> list[Step]:
    """N-1 steps after which rank r owns shard r."""
    rank, size = comm.rank, comm.world_size
    return [((rank - 1 - i) % size, (rank - 2 - i) % size, True) for i in range(size - 1)]


def _all_gather_steps(comm: Messenger) -> list[Step]:
    """N-1 steps that start with shard r on rank r."""
    rank, size = comm.rank, comm.world_size
    return [((rank - i) % size, (rank - 1 - i) % size, False) for i in range(size - 1)]


def _run(
    comm: Messenger, tensor: Tensor, op: ReduceOp, steps: list[Step], chunk_bytes: int
) -> None:
    assert chunk_bytes > 0, chunk_bytes
    flat = flat_view(tensor)
    if not steps:
        return
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    largest = ceil(len(flat) / comm.world_size)
    num_pieces = max(1, ceil(largest * flat.element_size() / chunk_bytes))
    shards = [shard.tensor_split(num_pieces) for shard in flat.tensor_split(comm.world_size)]
    scratch = flat.new_empty(2, ceil(largest / num_pieces))
    finish: Callable[[], None] = _nothing
    for i, ((sent, received, combines), piece) in enumerate(product(steps, range(num_pieces))):
        if num_pieces == 1:
            finish()  # [Note: Pieces]: we send it next
            finish = _nothing
        target = shards[received][piece]
        buffer = scratch[i % 2, : len(target)] if combines else target
        # Pieces of a shard, [n], the tensor's dtype; overlaps the combining of the piece before.
        work = comm.exchange([(shards[sent][piece], right)], [(buffer, left)])
        finish()
        finish = _finisher(work, op, buffer, target) if combines else work.wait
    finish()


def _nothing() -> None:
    """Do nothing: no piece precedes the first one."""


def _finisher(work: Work, op: ReduceOp, buffer: Tensor, target: Tensor) -> Callable[[], None]:
    """A function that waits for a piece and combines it with this rank's."""

    def finish() -> None:
        work.wait()
        combine(op, buffer, target, out=target)

    return finish


# -- two levels -----------------------------------------------------------------------------------


def hierarchical_all_reduce(
    intra: Messenger,
    inter: Messenger,
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    equal_nodes: bool,
) -> None:
    """Combine `tensor` (contiguous, any shape and length) over all nodes, in place, blocking.

    Shard-wise, for nodes of equal size n; 2 nodes with 2 ranks, the tensor's shards a and b:

        node 0   rank 0 ─┐ reduce-   ┌ a ─── all-reduce a with rank 2 ─── a ┐ all-    ┌ a b
                 rank 1 ─┘ scatter   └ b ─── all-reduce b with rank 3 ─── b ┘ gather  └ a b
        node 1   ...

    Between M nodes each rank sends 2(M-1)/M of a shard, which is 1/n of the tensor, and all network
    cards of a node work at once. With leaders, for nodes of any size: a binomial tree within each
    node to its first rank, a ring between these leaders, a binomial tree back. (If a node's ranks
    share memory, `shared_memory/hierarchy.py` does the inner part.)

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
    flat = flat_view(tensor)
    tree_reduce(intra, flat, op)
    if intra.rank == 0:
        ring_all_reduce(inter, flat, op)
    tree_broadcast(intra, flat)


def tree_all_reduce(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> None:
    """Combine contiguous `tensor` on all ranks, in place, blocking: up a binomial tree and down.

    2 log2(N) consecutive messages, each the whole tensor: for short tensors.
    """
    tree_reduce(comm, tensor, op)
    tree_broadcast(comm, tensor)


def tree_reduce(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> None:
    """Combine contiguous `tensor` on rank 0, by a binomial tree; others keep partial results.

    In rounds of distance 1, 2, 4, ... the upper rank of each pair sends and is done.
    """
    flat, rank = flat_view(tensor), comm.rank
    distance = 1
    while distance < comm.world_size:
        if rank & distance:
            comm.exchange([(flat, rank - distance)], []).wait()
            return
        if rank + distance < comm.world_size:
            other = torch.empty_like(flat)
            comm.exchange([], [(other, rank + distance)]).wait()
            combine(op, flat, other, out=flat)
        distance *= 2


def tree_broadcast(comm: Messenger, tensor: Tensor) -> None:
    """Copy rank 0's `tensor` to all ranks, down the same tree from its root."""
    flat, rank = flat_view(tensor), comm.rank
    distance = 1 << (comm.world_size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0 and rank + distance < comm.world_size:
            comm.exchange([(flat, rank + distance)], []).wait()
        elif rank % (2 * distance) == distance:
            comm.exchange([], [(flat, rank - distance)]).wait()


# -- a communicator -------------------------------------------------------------------------------


class P2PCommunicator:
    """A `Communicator` over the ranks of `messenger`, for small tensors; its collectives block.

    On a separate channel it interferes with no other traffic. A second thread may use it, and so
    may some ranks of a group that have no process group of those ranks. `group` is the underlying
    torch process group, if known; it provides the timeout.
    """

    def __init__(self, messenger: Messenger, group: Any = None) -> None:
        self.messenger = messenger
        self.group = group
        self.rank = messenger.rank
        self.world_size = messenger.world_size

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        flat = tensor.detach().contiguous()
        tree_all_reduce(self.messenger, flat, op)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return Done()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        flat = tensor.detach().contiguous()
        if self.rank == src:
            self.exchange([(flat, peer) for peer in self._peers()], []).wait()
        else:
            self.exchange([], [(flat, src)]).wait()
            tensor.detach().copy_(flat)
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        rows = tensor.new_empty(self.world_size, tensor.numel())
        rows[self.rank].copy_(tensor)
        sends = [(rows[self.rank], peer) for peer in self._peers()]
        self.exchange(sends, [(rows[peer], peer) for peer in self._peers()]).wait()
        output.copy_(rows.view(-1))
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        whole = tensor.clone()
        self.all_reduce(whole, op)
        output.copy_(whole.view(self.world_size, -1)[self.rank])
        return Done()

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.all_reduce(torch.zeros(1))

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`."""
        return self.messenger.exchange(sends, receives, channel)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]


# -- operands -------------------------------------------------------------------------------------

_COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def combine(op: ReduceOp, left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Store `left op right` in `out`, which may be one of the two.

    Ranks that combine the same pair must agree on which operand is left: the sum of two NaN, and
    the smaller of 0.0 and -0.0, depend on it.
    """
    _COMBINE[op](left, right, out=out)


def flat_view(tensor: Tensor) -> Tensor:
    """View `tensor` as [n], sharing its memory, without autograd."""
    assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)
