"""Sums over several ranks' memory, piece by piece, so that they happen in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import ReduceOp
from gradsync.comm.combine import combine

_CHUNK_BYTES = 2**18
"""Bytes of one operand's piece: a few of them fit into a core's second-level cache."""

Pair = tuple[int, int]
"""(left, right): add operand `right` to operand `left`."""


def pairs_of_tree(count: int) -> list[Pair]:
    """A balanced tree over `count` operands; the result is in operand 0."""
    pairs, distance = [], 1
    while distance < count:
        pairs += [(i, i + distance) for i in range(0, count - distance, 2 * distance)]
        distance *= 2
    return pairs


def reduce_in_place(
    operands: Sequence[Tensor],
    pairs: Iterable[Pair],
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
        copies: each [n]; those that share `operands[end]`'s memory are left alone.
        op: sum, min or max.
    """
    pairs = list(pairs)
    if end < 0:
        for copy in copies:
            copy.zero_()
        return
    result = operands[end]
    targets = [copy for copy in copies if copy.data_ptr() != result.data_ptr()]
    for here in chunks(result.numel(), result.element_size()):
        parts = [operand[here] for operand in operands]
        for left, right in pairs:
            combine(op, parts[left], parts[right], out=parts[left])
        for target in targets:
            target[here].copy_(parts[end])


def reduce_into(out: Tensor, operands: Sequence[Tensor], op: ReduceOp = "sum") -> None:
    """Combine `operands` along a balanced tree; they keep their values.

    Args:
        out: the result, [n].
        operands: each [n], of one dtype.
        op: sum, min or max.
    """
    if len(operands) == 1:
        out.copy_(operands[0])
        return
    for here in chunks(out.numel(), out.element_size()):
        parts = [operand[here] for operand in operands]
        while len(parts) > 2:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [combined(op, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        combine(op, *parts, out=out[here])


def combined(op: ReduceOp, left: Tensor, right: Tensor) -> Tensor:
    """`left op right` in new memory."""
    out = torch.empty_like(left)
    combine(op, left, right, out=out)
    return out


def chunks(numel: int, itemsize: int) -> Iterator[slice]:
    """Slices of at most `_CHUNK_BYTES` that cover [numel]."""
    size = _CHUNK_BYTES // itemsize
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def even_parts(numel: int, world_size: int) -> list[slice]:
    """Slices of [numel], one a rank, cut at multiples of 64 elements: one writer per cache line."""
    blocks = -(-numel // 64)
    edges = [min(blocks * rank // world_size * 64, numel) for rank in range(world_size + 1)]
    return [slice(edges[rank], edges[rank + 1]) for rank in range(world_size)]
