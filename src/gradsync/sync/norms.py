"""Norms of gradients, and clipping by them.

[Note: Fixed blocks] A norm is a sum, and a sum's bits depend on its grouping: per-parameter, flat
and sharded norms of the same gradient gave four different values. So the grouping is fixed. Each
parameter is cut into blocks of 65,536 elements, each block's norm is computed alone (fp32), and
the squares are added in float64 in parameter order. It does not depend on buckets, shards or ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import foreach_copy_, foreach_mul_, foreach_norm
from gradsync.sync.layout import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256
"""Number of blocks whose norms a GPU computes in one call."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all `gradients`, fp32 [] (fp64 if one of them is), see [Note: Fixed blocks]."""
    if not gradients:
        return torch.zeros(())
    double = any(gradient.dtype == torch.float64 for gradient in gradients)
    # Contiguous, because a sum over strided memory is grouped differently.
    in_blocks = (
        (g,) if g.numel() <= BLOCK else g.view(-1).split(BLOCK)
        for g in (gradient.contiguous() for gradient in gradients)
    )
    return norm_from_blocks(norms_of_blocks([*chain(*in_blocks)]), double=double)


def norms_of_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """L2 norm of each of `blocks`, contiguous; fp64 [len(blocks)]."""
    return norms_in_rows(blocks) if blocks and blocks[0].is_cuda else _norms_alone(blocks)


def _norms_alone(blocks: Sequence[Tensor]) -> Tensor:
    # 16-bit blocks are widened first, or their norms would be rounded to 16 bits.
    wide = [block.float() if block.element_size() == 2 else block for block in blocks]
    dtypes = {block.dtype for block in wide}
    if len(dtypes) == 1:
        return torch.stack(foreach_norm(wide)).double()
    # One call per dtype: on a GPU a call with several takes another kernel, with other bits.
    found: dict[int, Tensor] = {}
    for dtype in dtypes:
        places = [place for place, block in enumerate(wide) if block.dtype == dtype]
        norms = foreach_norm([wide[place] for place in places])
        found.update(zip(places, norms, strict=True))
    return torch.stack([found[place].double() for place in range(len(wide))])


def norms_in_rows(blocks: Sequence[Tensor]) -> Tensor:
    """`norms_of_blocks` with few launches. Whole blocks are stacked to rows, always equally many,
    since on a GPU a sum's grouping depends on the shape. The rest goes one by one, in one call."""
    rows = [block.numel() == BLOCK and block.element_size() <= 4 for block in blocks]
    whole = [block for block, in_row in zip(blocks, rows, strict=True) if in_row]
    rest = [block for block, in_row in zip(blocks, rows, strict=True) if not in_row]
    found = []
    room = blocks[0].new_zeros((_ROWS if whole else 0, BLOCK), dtype=torch.float32)
    for first in range(0, len(whole), _ROWS):
        taken = whole[first : first + _ROWS]
        foreach_copy_(list(room[: len(taken)].unbind()), taken)
        found.append(torch.linalg.vector_norm(room, dim=1)[: len(taken)].double())
    if rest:
        found.append(_norms_alone(rest))
    return torch.cat(found)[_in_order(tuple(rows), blocks[0].device)]


@functools.cache
def _in_order(rows: tuple[bool, ...], device: torch.device) -> Tensor:
    """Places of the blocks, with those in rows first; copied to `device` once, since a copy waits
    for all work of the device."""
    order = sorted(range(len(rows)), key=lambda number: not rows[number])
    return torch.tensor(order).argsort().to(device)


def norm_from_blocks(norms: Tensor, *, double: bool) -> Tensor:
    """The total norm, fp32 (fp64 if `double`) [], from the norms of all blocks in order."""
    # In a fixed order: cumsum's on a CPU, for any vector width; on a GPU cumsum varies, sum() not.
    total = norms.square().sum() if norms.is_cuda else norms.square().cumsum(0)[-1]
    return total.sqrt().to(torch.float64 if double else torch.float32)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor, at most 1, that scales a gradient of norm `norm` to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_all(tensors: list[Tensor], factor: Any) -> None:
    """Multiply in place, by a number or a tensor []. Skips a factor 1.0 (gradients that need no
    clipping) if it is known without waiting for a device."""
    is_known = isinstance(factor, float) or factor.device.type == "cpu"
    if tensors and not (is_known and float(factor) == 1.0):
        foreach_mul_(tensors, factor)


def clip_gradients(
    gradients: Sequence[Tensor], max_norm: float, memory: Sequence[Tensor] | None = None
) -> Tensor:
    """Scale `gradients` in place so that their norm is at most `max_norm` (Pascanu et al. 2013,
    arXiv 1211.5063); returns the norm before, []. If `memory` is given, it holds all of them."""
    norm = gradient_norm(gradients)
    # Between tensors [] torch promotes dtypes; between [1] and [], as in shards, it does not.
    held = memory or gradients
    scale_all([m if m.dim() else m.view(1) for m in held], clip_factor(norm, max_norm))
    return norm


def clip_shards(
    shards: list[Tensor], max_norm: float, comm: Communicator, device: torch.device
) -> Tensor:
    """Like `clip_gradients`, for gradients that are divided among ranks; a rank may hold none. The
    norm is that of all gradients; its last bits depend on how they are cut."""
    square = gradient_norm(shards).to(device).double().square()
    # Whole group, float64 []; overlaps nothing, since the factor depends on it.
    comm.all_reduce(square).wait()
    double = any(shard.dtype == torch.float64 for shard in shards)
    norm = square.sqrt() if double else square.sqrt().float()
    scale_all(shards, clip_factor(norm, max_norm))
    return norm
