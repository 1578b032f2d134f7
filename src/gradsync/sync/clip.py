"""The gradient's L2 norm, clipping by it, and the warning of gradients that are not finite.

[Note: Fixed blocks] A norm is a sum, and a sum's bits depend on how it is grouped: per parameter,
flat and sharded norms of the same gradient gave four different values. So the grouping is fixed:
each parameter is cut into blocks of 65,536 elements, each block's norm is taken alone (fp32), and
the squares are added in float64 in parameter order. Buckets, shards and ranks do not appear.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.core.torch_private import foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")

BLOCK = 65_536
"""Elements of a block; a block never spans two parameters."""
_CUDA_STEPS = 100
"""Steps between two looks at the gradients on CUDA, where each waits for the device."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all `gradients` (any shapes), fp32 [] (fp64 if any of them is), see
    [Note: Fixed blocks]; on CUDA it stays on the device."""
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
        # Between tensors [] torch promotes dtypes; between [1] and [], as in shards, not.
        rows = [g if g.dim() else g.view(1) for g in gradients]
        foreach_mul_(rows, clip_factor(norm, max_norm))
    return norm


def clip_shards(
    shards: list[Tensor], max_norm: float, comm: Communicator, device: torch.device
) -> Tensor:
    """Do what `clip_gradients` does for gradients of which each rank holds some, or none: the norm
    is that of all, and its last bits depend on where they are cut."""
    square = gradient_norm(shards).to(device).double().square()
    # Whole group, float64 []; overlaps nothing: the factor depends on it.
    comm.all_reduce(square).wait()
    norm = square.sqrt().float()
    if shards:
        foreach_mul_(shards, clip_factor(norm, max_norm))
    return norm


class NonFinite:
    """Warns when this rank's gradients become nan or inf, before sums hide whose they are; once,
    until they are finite again.

    Per step: `look` before gradients are sent, in one or several parts; then `step_ends`.
    """

    def __init__(self) -> None:
        self._step = 0
        self._said = False
        self._found: list[str] = []

    def look(self, named: Iterable[tuple[str, Tensor]], *, on_cuda: bool) -> None:
        """Note the names of gradients that are not finite: reads their memory once."""
        if on_cuda and self._step % _CUDA_STEPS:
            return
        if found := non_finite(named):
            self._found.append(found)

    def step_ends(self, rank: int) -> None:
        """Warn about this step's findings; steps are counted from the first one of this model."""
        self._step += 1
        if self._found and not self._said:
            log.warning(
                "rank %d, step %d: nan or inf in this rank's gradient of %s; every rank gets it "
                "with the next sum or average",
                *(rank, self._step, ", ".join(self._found)),
            )
        self._said, self._found = bool(self._found), []
