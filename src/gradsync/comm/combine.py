"""Elementwise combination of two tensors: the arithmetic of every algorithm made of messages."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.comm.base import ReduceOp

_COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def combine(op: ReduceOp, left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Store `left op right` in `out`.

    Args:
        op: sum, min or max. Ranks that combine the same pair must agree on which one is left: the
            sum of two NaN, and the smaller of 0.0 and -0.0, depend on it.
        left: any shape.
        right: same shape and dtype.
        out: same shape and dtype; may be one of the two.
    """
    _COMBINE[op](left, right, out=out)


def flat_view(tensor: Tensor) -> Tensor:
    """View `tensor` as [n], sharing its memory, without autograd."""
    assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)
