"""The end of a step: everything meets here, whatever the strategy.

[Note: Exact global mean] A rank's micro-steps add up gradients of *summed* losses. At the step's
end one small all-reduce makes (loss sum, weight) global, the strategy makes the gradients global
sums, and both are divided once by the global weight. So the mean is exact for unequal token
counts, padding (weight 0), unequal shares and ranks without data: no mean of means anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.agreement import Agreement, agree
from gradsync.sync.hyperparameters import Settings, digest, settings_of
from gradsync.sync.loss_sum import LossSum
from gradsync.sync.reducer import Reducer
from gradsync.sync.replica_watch import ReplicaWatch
from gradsync.sync.statistics import Statistics
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")

_NOT_UPDATED = (
    "no rank has updated its weights; give all ranks the same (a scheduler that looks at a loss: "
    "sync.mean_loss)"
)
_NO_BACKWARD = (
    "step() came without a backward on any rank since the last step (several optimizers for one "
    "model: make it one with groups, or use loss.backward() and their own step())"
)


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
    watch: ReplicaWatch | None = None
    """None where ranks hold parts of a model: neither weights nor optimizers are compared then."""


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
        ConfigError: on all ranks: none of them had a backward; they step with other optimizers.
        RunError: on all ranks: weights were changed on some, and differ now.
    """
    reducer, comm = parts.reducer, parts.comm
    optimizers = [] if update is None else [update.optimizer]
    if update is None:
        reducer.forget()
    else:
        reducer.expect(update.optimizer, scaled=scale is not None)
    counts = parts.statistics.step_begins()
    agreed, settings = _agree(parts, loss, optimizers, reducer.launch(), counts, stop=stop)
    reduction = reducer.reduce(agreed.used)
    norm = None
    # From here on gradients, loss and weight are used up, also when a user's hook raises.
    try:
        if parts.watch is not None:
            parts.watch.refuse_unlike(agreed, settings, _NOT_UPDATED)
        total_loss, total_weight = torch.tensor(0.0, dtype=torch.float64), 0.0
        if not agreed.discard:  # a loop of one's own, which discards, tells no loss
            total_loss, total_weight = loss.over_ranks(comm, agreed.loss)
        # What `.grad` holds the sum over: the global batch, or only this rank's part of it.
        weight = loss.weight if reduction.local else total_weight
        if agreed.discard or update is None:
            log.warning("a rank threw this step's gradients away: no rank updates its weights")
        elif weight:
            factor = reduction.divided_by / weight
            norm = _update(reducer, update, factor, enclosed, clip_norm=clip_norm, scale=scale)
        elif not total_weight and not any(agreed.used):
            raise ConfigError(_NO_BACKWARD)
    finally:
        loss.clear()
        reducer.clear_gradients()
    parts.statistics.step_ends(agreed.counts)
    reducer.after_step()
    if parts.watch is not None and not agreed.discard:
        parts.watch.remember(*optimizers)
    return StepResult(
        *(total_loss / total_weight, total_weight, norm, agreed.stop, reduction.exposed),
        discarded=agreed.discard,
    )


def _agree(
    parts: StepParts,
    loss: LossSum,
    optimizers: Sequence[torch.optim.Optimizer],
    used: Sequence[bool],
    counts: Sequence[int],
    *,
    stop: bool,
) -> tuple[Agreement, Settings]:
    """The step's small message, and this rank's settings, of which it holds the digest."""
    comm, watch, changed = parts.comm, parts.watch, False
    settings: Settings = {}
    if watch is not None and comm.world_size > 1:
        settings["the call"] = "sync.step()"
        for number, optimizer in enumerate(optimizers):
            settings |= settings_of(optimizer, parts.reducer.parameters, number=number)
            settings[f"the state of optimizer {number}"] = watch.state_of(optimizer)
        changed = watch.changed()
    agreed = agree(
        *(comm, used, counts, loss.message()),
        stop=stop,
        discard=not optimizers,
        number=parts.number,
        digest=digest(settings),
        changed=changed,
    )
    return agreed, settings


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
