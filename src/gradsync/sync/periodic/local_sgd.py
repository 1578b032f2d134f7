"""`local_sgd`: step alone, average weights every `inner_steps` steps.

Stich 2018 (arXiv 1805.09767); Lin et al. 2018 (arXiv 1808.07217). See `rounds.py` for the picture.
Bytes per rank: 2(W-1)/W S every `inner_steps` steps, S = size of the weights and floating buffers;
one operation per dtype; one copy of the weights while ranks meet. With `inner_steps=1`, plain SGD
and equal shares this is synchronous SGD to rounding; with momentum or Adam it is not, and it need
not train as well: that depends on the problem and on `inner_steps`.

All ranks have the same weight in the mean, as in the papers, whatever their numbers of targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.sync.periodic.inner_state import average_state
from gradsync.sync.periodic.mean import mean_over_ranks
from gradsync.sync.periodic.rounds import RoundReducer

if TYPE_CHECKING:
    from torch import nn


class LocalSgdReducer(RoundReducer):
    """Averages weights, floating buffers and, if asked, the optimizer's momenta.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        inner_steps: steps between two averages (H in the papers).
        average_optimizer: average momenta and second moments too. Off by default, as in the papers:
            it doubles (SGD with momentum) or triples (Adam) the bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        inner_steps: int = 8,
        average_optimizer: bool = False,
    ) -> None:
        super().__init__(model, comm, inner_steps=inner_steps)
        self._average_optimizer = average_optimizer
        self._optimizer_of: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Do one step on this rank alone."""
        self._optimizer_of |= {
            p: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        super().update(optimizers)

    def meet(self) -> None:
        """Set every parameter to its mean over ranks."""
        with torch.no_grad():
            means = mean_over_ranks(self.parameters, self.comm)
            for parameter, mean in zip(self.parameters, means, strict=True):
                parameter.copy_(mean)
        if self._average_optimizer:
            average_state(self._optimizer_of, self.parameters, self.comm)
