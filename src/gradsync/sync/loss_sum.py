"""The step's loss and weight on this rank, and the loss over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator

if TYPE_CHECKING:
    from torch import Tensor


class LossSum:
    """Adds up leaves; float64, so that fp32 losses add exactly in any order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss: Tensor | None = None
        self.weight = 0.0
        """Targets (or samples) of this rank's leaves."""

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """One leaf's summed loss, [], and weight."""
        detached = loss_sum.detach().double()
        self._loss = detached if self._loss is None else self._loss + detached
        self.weight += weight

    def on_cpu(self) -> float:
        """The loss when it costs no wait: on a CPU it travels with the step's small message."""
        return 0.0 if self._loss is None or self._loss.is_cuda else float(self._loss)

    def over_ranks(self, comm: Communicator, sum_on_cpu: float) -> Tensor:
        """The loss over all ranks; on CUDA by one more all-reduce, float64 [], on the device."""
        if self._device.type != "cuda":
            return torch.tensor(sum_on_cpu, dtype=torch.float64)
        loss = self._loss
        if loss is None:
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
        comm.all_reduce(loss).wait()
        return loss
