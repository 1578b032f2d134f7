"""Combining tensors, whole or piece by piece so that it happens in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import ReduceOp

_COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
_CHUNK_BYTES = 2**18
"""Bytes of one operand's piece: a few of them fit into a core's second-level cache."""

Pair = tuple[int, int]
"""(left, right): add operand `right` to operand `left`."""


def combine(op: ReduceOp, left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Store `left op right` in `out`, which may be one of the two.

    Ranks that combine the same pair must agree on which one is left: the sum of two NaN, and the
    smaller of 0.0 and -0.0, depend on it.
    """
    _COMBINE[op](left, right, out=out)


def flat_view(tensor: Tensor) -> Tensor:
    """View `tensor` as [n], sharing its memory, without autograd."""
    assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)


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
    for here in _chunks(result):
        parts = [operand[here] for operand in operands]
        for left, right in pairs:
            combine(op, parts[left], parts[right], out=parts[left])
        for target in targets:
            target[here].copy_(parts[end])


def reduce_into(out: Tensor, operands: Sequence[Tensor], op: ReduceOp = "sum") -> None:
    """Store in `out`, [n], the `operands`, each [n], combined along a balanced tree; they keep
    their values."""
    if len(operands) == 1:
        out.copy_(operands[0])
        return
    for here in _chunks(out):
        parts = [operand[here] for operand in operands]
        while len(parts) > 2:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [_COMBINE[op](*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        combine(op, *parts, out=out[here])


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Slices of at most `_CHUNK_BYTES` that cover `flat`."""
    size = _CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), size):
        yield slice(start, min(start + size, flat.numel()))


def even_parts(numel: int, world_size: int) -> list[slice]:
    """Slices of [numel], one a rank, cut at multiples of 64 elements: one writer per cache line."""
    blocks = -(-numel // 64)
    edges = [min(blocks * rank // world_size * 64, numel) for rank in range(world_size + 1)]
    return [slice(edges[rank], edges[rank + 1]) for rank in range(world_size)]
