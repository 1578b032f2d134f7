"""The step's loss and weight, over leaves and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.limbs import NUM_LIMBS, join, split

if TYPE_CHECKING:
    from torch import Tensor

NO_LOSS = (0.0,) * (2 * NUM_LIMBS)
"""Message of a rank whose loop gives no loss: of the others' length, since a rank that discards a
step may not know how they end it."""


class LossSum:
    """This rank's loss and weight; sums over all ranks do not depend on the distribution of
    leaves, see [Note: Limbs] in limbs.py.

    Args:
        device: device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    @property
    def num_leaves(self) -> int:
        """Number of leaves added."""
        return len(self._losses)

    @property
    def weight(self) -> float:
        """Number of targets (or samples) of this rank's leaves."""
        return math.fsum(self._weights)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses are finite; unchecked on CUDA, where it would wait."""
        return self._device.type == "cuda" or all(map(torch.isfinite, self._losses))

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """Add one leaf's summed loss, [], and weight."""
        self._losses.append(loss_sum.detach().to(self._device, torch.float64, copy=True))
        self._weights.append(weight)

    def clear(self) -> None:
        """Start over with no leaves."""
        self._losses.clear()
        self._weights.clear()

    def message(self) -> list[float]:
        """This rank's part of the step's small message, [2 NUM_LIMBS]: the weight, and the loss
        where that costs no wait, on a CPU."""
        weights = split(torch.tensor(self._weights, dtype=torch.float64)).tolist()
        if self._device.type == "cuda":
            return [*weights, *[0.0] * NUM_LIMBS]
        return [*weights, *self._limbs().tolist()]

    def over_ranks(self, comm: Communicator, summed: Sequence[float]) -> tuple[Tensor, float]:
        """Loss (float64 []) and weight over all ranks, from the sum of their messages.

        On CUDA by one more all-reduce: whole group, float64 [NUM_LIMBS], on the device, overlaps
        the buckets in progress.
        """
        weight = join(summed[:NUM_LIMBS])
        if self._device.type != "cuda":
            return torch.tensor(join(summed[NUM_LIMBS:]), dtype=torch.float64), weight
        limbs = self._limbs()
        comm.all_reduce(limbs).wait()
        return limbs[:-1].flip(0).sum() + limbs[-1], weight

    def _limbs(self) -> Tensor:
        if not self._losses:
            return torch.zeros(NUM_LIMBS, dtype=torch.float64, device=self._device)
        return split(torch.stack(self._losses))


def leaf_weight(weight: float | Tensor | None, leaf: Any) -> float:
    """Weight of a leaf: `weight`, or else the leaf's number of targets.

    Raises:
        TypeError: neither is given.
        ConfigError: negative, infinite or undefined.
    """
    if weight is None:
        if leaf is None:
            raise TypeError("backward() needs weight= (the number of targets) or leaf=")
        weight = leaf.num_targets
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise ConfigError(f"backward(weight=...) must be a finite number >= 0, got {weight}")
    return weight
