"""The gradient's L2 norm, with bits that do not depend on ranks, buckets or shards.

[Note: Fixed blocks] A norm is a sum, and a sum's bits depend on how it is grouped: per parameter,
flat and sharded norms of the same gradient gave four different values. So the grouping is fixed:
each parameter is cut into blocks of 65,536 elements, each block's norm is taken alone (fp32), and
the squares are added in float64 in parameter order. Buckets, shards and ranks do not appear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.core.torch_private import foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 65_536
"""Elements of a block; a block never spans two parameters."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all `gradients` (any shapes), fp32 [] (fp64 if any of them is), see
    [Note: Fixed blocks].

    On CUDA nothing is read back: the result stays on the device.
    """
    if not gradients:
        return torch.zeros(())
    double = any(gradient.dtype == torch.float64 for gradient in gradients)
    # Contiguous: a sum over strided memory is grouped differently.
    blocks = [block for g in gradients for block in g.contiguous().view(-1).split(BLOCK)]
    return norm_from_blocks(norms_of_blocks(blocks), double=double)


def norms_of_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """L2 norm of each of `blocks`, contiguous; fp64 [len(blocks)]."""
    # 16-bit blocks are widened first, or their norms would be rounded to 16 bits.
    blocks = [block.float() if block.element_size() == 2 else block for block in blocks]
    return torch.stack([norm.double() for norm in foreach_norm(blocks)])


def norm_from_blocks(norms: Tensor, *, double: bool) -> Tensor:
    """The total norm, fp32 (fp64 if `double`) [], from those of all blocks in order."""
    # cumsum adds one after the other, whatever the vector width; sum() would not.
    return norms.square().cumsum(0)[-1].sqrt().to(torch.float64 if double else torch.float32)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor, at most 1, that scales a gradient of norm `norm` to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale `gradients` in place so that their norm is at most `max_norm` (Pascanu et al. 2013,
    arXiv 1211.5063); returns the norm before, []."""
    norm = gradient_norm(gradients)
    if gradients:
        foreach_mul_(list(gradients), clip_factor(norm, max_norm))
    return norm
