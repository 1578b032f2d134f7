"""All-reduce in two levels: inside each node, then between nodes, over the slow network.

Shard-wise, for nodes of equal size n; 2 nodes with 2 ranks, the tensor's shards a and b:

    node 0   rank 0 ─┐ reduce-   ┌ a ─── all-reduce a with rank 2 ─── a ┐ all-    ┌ a b
             rank 1 ─┘ scatter   └ b ─── all-reduce b with rank 3 ─── b ┘ gather  └ a b
    node 1   rank 2 ─┐ reduce-   ┌ a ─── all-reduce a with rank 0 ─── a ┐ all-    ┌ a b
             rank 3 ─┘ scatter   └ b ─── all-reduce b with rank 1 ─── b ┘ gather  └ a b

Between the nodes each rank sends 2(M-1)/M of a shard (M nodes), which is 1/n of the tensor, and all
of a node's network cards work at once.

With leaders, for nodes of any size: a binomial tree inside each node to its local rank 0, a ring
between these leaders, a binomial tree back. Only the leaders' cards work.

Both use messages only, on any device. Where a node's ranks share memory,
`shared_memory/hierarchy.py` does the inner part there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.comm.base import Messenger, ReduceOp
from gradsync.comm.combine import combine, flat_view
from gradsync.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def hierarchical_all_reduce(
    intra: Messenger,
    inter: Messenger,
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    equal_nodes: bool,
) -> None:
    """Combine `tensor` (contiguous, any shape and length) over all nodes, in place, blocking.

    Args:
        intra: the ranks of this node.
        inter: the ranks of all nodes at this rank's position in their `intra`.
        tensor: same shape and dtype on all ranks.
        op: sum, min or max.
        equal_nodes: whether all nodes have the same number of ranks: then shard-wise, otherwise
            with leaders, where only the first rank of a node uses its `inter`. The same on all
            ranks: take it from `Groups.equal_nodes`.
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


def tree_reduce(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> None:
    """Combine `tensor` over all ranks on rank 0, by a binomial tree; others keep partial results.

    Rounds of distance 1, 2, 4, ...: in each pair the upper rank sends and is done.

    Args:
        comm: the ranks that take part.
        tensor: contiguous, any shape; same shape and dtype on all ranks.
        op: sum, min or max.
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
    distance = 1
    while distance < comm.world_size:
        distance *= 2
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0 and rank + distance < comm.world_size:
            comm.exchange([(flat, rank + distance)], []).wait()
        elif rank % (2 * distance) == distance:
            comm.exchange([], [(flat, rank - distance)]).wait()
