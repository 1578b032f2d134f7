"""Norms of all blocks of the gradient, each computed by the rank that owns it, read by all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.sync.clip import norm_from_blocks, norms_of_blocks
from gradsync.sync.host.flat import Flat
from gradsync.sync.host.runs import BLOCK, Run

if TYPE_CHECKING:
    from torch import Tensor


class BlockNorms:
    """Shared norms of a host's ranks, see [Note: Fixed blocks] in clip.py.

    Args:
        comm: the ranks of the host.
        flats: the gradients' buffers.
        parameters: in the order in which their norms are added.
    """

    def __init__(
        self, comm: SharedMemoryCommunicator, flats: Sequence[Flat], parameters: Sequence[Tensor]
    ) -> None:
        self._counts = torch.tensor([-(-p.numel() // BLOCK) for p in parameters])
        *firsts, count = [0, *self._counts.cumsum(0).tolist()]
        self._norms = comm.allocate_once(max(count, 1), torch.float64)
        self._places = [
            {
                run.start: torch.tensor([firsts[b.index] + b.number for b in run.blocks])
                for run in flat.runs
            }
            for flat in flats
        ]
        self._blocks: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}

    def take(self, flat: int, run: Run, gradient: Tensor) -> None:
        """Store the norms of one run's blocks.

        Args:
            flat: index of the flat buffer.
            run: blocks of this rank.
            gradient: the whole flat buffer, [flat.numel].
        """
        key, place = (flat, run.start), gradient.data_ptr()
        if key not in self._blocks or self._blocks[key][0] != place:
            blocks = [gradient[block.start : block.stop] for block in run.blocks]
            self._blocks[key] = place, blocks  # most often the same memory in every step
        norms = norms_of_blocks(self._blocks[key][1])
        self._norms.index_copy_(0, self._places[flat][run.start], norms)

    def total(self, used: Sequence[bool], *, double: bool) -> Tensor:
        """The gradient's norm, []; call it after all ranks have stored theirs.

        Args:
            used: for each parameter, whether its gradient counts; the others are zeros.
            double: a gradient is in fp64, so the norm is too.
        """
        norms = self._norms
        if not all(used):
            norms = norms.where(torch.tensor(used).repeat_interleave(self._counts), 0.0)
        return norm_from_blocks(norms, double=double)
