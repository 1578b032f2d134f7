"""All-reduce by recursive doubling: ranks swap the whole tensor in pairs, log2(N) times.

    N = 4       rank 0      rank 1      rank 2      rank 3
    round 1     0 <──────────> 1        2 <──────────> 3
    round 2     01 <─────────────────────> 23                 rank 0 with 2
                            01 <─────────────────────> 23     rank 1 with 3
    result      0123        0123        0123        0123

Few messages (latency log2(N) instead of the ring's 2(N-1)), many bytes (log2(N) times the tensor
per rank): meant for short tensors. When N is not a power of two, the first 2(N - 2^k) ranks fold in
pairs first: the even one hands its tensor to the odd one, and gets the result in the end (Thakur,
Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH").

    N = 5       0 ──> 1, then 1, 2, 3, 4 as above, then 1 ──> 0

The lower rank's part is always the left operand, so both sides of a swap compute the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.comm.base import Messenger, ReduceOp
from gradsync.comm.combine import combine, flat_view


def doubling_all_reduce(comm: Messenger, tensor: Tensor, op: ReduceOp = "sum") -> None:
    """Combine `tensor` (contiguous, any shape and length) over all ranks, in place, blocking.

    Sends log2(N) times the tensor per rank where N is a power of two; otherwise, with 2^k the next
    lower one, k times and, on the 2(N - 2^k) ranks that fold, the even ones 1 and the odd ones k+1
    times. Extra memory: one copy of the tensor.

    Args:
        comm: the ranks that take part.
        tensor: same shape and dtype on all ranks.
        op: sum, min or max.
    """
    mine = flat_view(tensor)
    rank, world_size = comm.rank, comm.world_size
    power = 1 << (world_size.bit_length() - 1)
    folded = 2 * (world_size - power)
    if rank < folded and rank % 2 == 0:
        comm.exchange([(mine, rank + 1)], []).wait()
        comm.exchange([], [(mine, rank + 1)]).wait()
        return
    other = torch.empty_like(mine)
    if rank < folded:
        comm.exchange([], [(other, rank - 1)]).wait()
        combine(op, other, mine, out=mine)
    place = rank // 2 if rank < folded else rank - folded // 2
    distance = 1
    while distance < power:
        peer_place = place ^ distance
        peer = 2 * peer_place + 1 if peer_place < folded // 2 else peer_place + folded // 2
        comm.exchange([(mine, peer)], [(other, peer)]).wait()
        left, right = (mine, other) if rank < peer else (other, mine)
        combine(op, left, right, out=mine)
        distance *= 2
    if rank < folded:
        comm.exchange([(mine, rank - 1)], []).wait()
