"""The end of a step: everything meets here, whatever the strategy.

[Note: Exact global mean] A rank's micro-steps add up gradients of *summed* losses. At the step's
end one small all-reduce makes (loss sum, weight) global, the strategy makes the gradients global
sums, and both are divided once by the global weight. So the mean is exact for unequal token
counts, padding (weight 0), unequal shares and ranks without data: no mean of means anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.agreement import agree
from gradsync.sync.loss_sum import LossSum
from gradsync.sync.reducer import Reducer
from gradsync.sync.statistics import Statistics
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step saw, equal on all ranks."""

    mean_loss: Tensor
    """Loss per target over the global batch, float64 [] on the model's device."""
    weight: float
    """Number of targets (or samples) in the global batch."""
    grad_norm: Tensor | None
    """L2 norm of the mean gradient before clipping, [] ; None without clipping. Under strategies
    that step alone (`local_sgd`, `diloco`) it is this rank's own."""
    stop: bool
    """True when any rank asked to stop."""
    exposed: Stopwatch
    """Communication that nothing hid, on this rank."""
    discarded: bool = False
    """True when a rank called `discard`: no rank has updated anything."""


class Update:
    """What a GradScaler takes for an optimizer: the strategy's own way of stepping."""

    def __init__(self, reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.optimizer = optimizer
        self._reducer = reducer

    def step(self) -> None:
        """One step with the mean gradient."""
        self._reducer.update(self.optimizer)


@dataclass(frozen=True, slots=True)
class StepParts:
    """Who takes part in every step of one model."""

    reducer: Reducer
    comm: Communicator
    statistics: Statistics
    number: int
    """Of the model, the same on all ranks; see `agree`."""


def take_step(
    parts: StepParts,
    loss: LossSum,
    update: Update | None,
    *,
    enclosed: Callable[[], AbstractContextManager[None]],
    clip_norm: float | None = None,
    stop: bool = False,
    scale: Any = None,
) -> StepResult:
    """Synchronise, divide once, clip, and `update` unless that is None on some rank.

    Args:
        parts, loss: of the model; of this rank's leaves.
        update: None throws all ranks' gradients away.
        enclosed: for the optimizer's own step, in which hooks have nothing to do.
        clip_norm, stop, scale: as for `GradientSync.step`.

    Raises:
        ConfigError: on all ranks: none of them had a backward.
    """
    reducer, comm = parts.reducer, parts.comm
    if update is None:
        reducer.forget()
    else:
        reducer.expect(update.optimizer, scaled=scale is not None)
    counts = parts.statistics.step_begins()
    reducer.look(wanted=update is not None and scale is None and not loss.is_finite)
    used = reducer.launch()
    told = {"loss": loss.message(), "number": parts.number}
    agreed = agree(comm, used, counts, stop=stop, discard=update is None, **told)
    reduction = reducer.reduce(agreed.used)
    nothing = torch.tensor(0.0, dtype=torch.float64), 0.0  # a loop of one's own tells no loss
    total_loss, total_weight = nothing if agreed.discard else loss.over_ranks(comm, agreed.loss)
    # What `.grad` holds the sum over: the global batch, or only this rank's part of it.
    weight = loss.weight if reduction.local else total_weight
    # From here on gradients, loss and weight are used up, also when a user's hook raises.
    loss.clear()
    norm = None
    try:
        if agreed.discard or update is None:
            log.warning("a rank threw this step's gradients away: no rank updates its weights")
        elif weight:
            factor = reduction.divided_by / weight
            norm = _update(reducer, update, factor, enclosed, clip_norm=clip_norm, scale=scale)
        elif not total_weight and not any(agreed.used):
            raise ConfigError(
                "step() came without a backward on any rank since the last step (several "
                "optimizers for one model: make it one with groups, or use loss.backward() and "
                "their own step())"
            )
    finally:
        reducer.clear_gradients()
    parts.statistics.step_ends(agreed.counts)
    reducer.after_step()
    return StepResult(
        *(total_loss / total_weight, total_weight, norm, agreed.stop, reduction.exposed),
        discarded=agreed.discard,
    )


def _update(
    reducer: Reducer,
    update: Update,
    factor: float,
    enclosed: Callable[[], AbstractContextManager[None]],
    *,
    clip_norm: float | None,
    scale: Any,
) -> Tensor | None:
    """From the sum of gradients to new weights; the norm before clipping."""
    if scale is not None:
        scale.unscale_(update)
    # The one place that divides, whatever the strategy.
    reducer.divide(factor)
    norm = None if clip_norm is None else reducer.clip(clip_norm)
    with enclosed():
        update.step() if scale is None else scale.step(update)
    if scale is not None:
        scale.update()
    return norm
