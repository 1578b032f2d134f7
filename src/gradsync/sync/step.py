"""The end of a step: its phases in order, whatever the strategy.

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
from gradsync.sync.buffers import BufferSync
from gradsync.sync.check_replicas import ReplicaWatch
from gradsync.sync.loss import LossSum
from gradsync.sync.optimizers import Settings, digest, settings_of
from gradsync.sync.reducer import Reducer
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")

_NOT_UPDATED = (
    "no rank has updated its weights; give all ranks the same (a scheduler that looks at a loss: "
    "sync.mean_loss)"
)
_NO_BACKWARD = (
    "step() came without a backward on any rank since the last step, which used up all gradients: "
    "several optimizers after one backward are one call, sync.step([a, b]); several models in one "
    "backward are one handle, gs.replicate(torch.nn.ModuleList([a, b]))"
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one optimizer step, equal on all ranks."""

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
    """Communication on this rank that nothing overlapped."""
    discarded: bool = False
    """True when a rank called `discard`: no rank has updated anything."""


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One, or several that hold different parameters."""


def each_optimizer(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Convert `optimizers` to a list.

    Raises:
        ConfigError: the list is empty, or an entry is no optimizer.
    """
    found = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in found:
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                "expected an optimizer of torch.optim or a list of them, got "
                f"{type(optimizer).__name__}"
            )
    if not found:
        raise ConfigError("expected at least one optimizer, got an empty list")
    return found


class Update:
    """All optimizers of a step as one: a GradScaler takes it for an optimizer, so that a gradient
    that is not finite prevents all their steps.

    Args:
        reducer: of the model.
        optimizers: hold different parameters; the gradients of parameters in none are dropped.

    Raises:
        ConfigError: two optimizers hold the same parameter.
    """

    def __init__(self, reducer: Reducer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for o in optimizers for group in o.param_groups]
        self._reducer = reducer
        held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
        either = set().union(*held)
        if len(either) < sum(map(len, held)):
            raise _held_twice(reducer, held)
        known = reducer.parameters
        self.unheld = {index for index, p in enumerate(known) if id(p) not in either}
        """Indices in `reducer.parameters` of those that no optimizer holds."""
        if len(self.unheld) == len(known):
            self.unheld = set()  # it holds other parameters instead, such as copies in fp32

    def step(self) -> None:
        """Do one step with the mean gradient."""
        self._reducer.update(self.optimizers)


def _held_twice(reducer: Reducer, held: Sequence[set[int]]) -> ConfigError:
    named = reducer.model.named_parameters()
    names = [name for name, p in named if sum(id(p) in ids for ids in held) > 1]
    return ConfigError(
        f"parameter {names[0] if names else '(not of this model)'!r} is in two of the optimizers "
        "given to sync.step(), which would update it twice: each parameter belongs into one"
    )


@dataclass(frozen=True, slots=True)
class StepParts:
    """Objects that take part in every step of one model."""

    reducer: Reducer
    comm: Communicator
    statistics: BufferSync
    number: int
    """Number of the model, the same on all ranks; see `agree`."""
    watch: ReplicaWatch | None = None
    """None where ranks hold parts of a model: then neither weights nor optimizers are compared."""


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
        parts: the model's objects.
        loss: loss and weight of this rank's leaves.
        update: None discards all ranks' gradients.
        enclosed: encloses the optimizer's own step, in which hooks have nothing to do.
        clip_norm, stop, scale: as for `GradientSync.step`.

    Raises:
        ConfigError: on all ranks: none of them had a backward; they step with different optimizers.
        RunError: on all ranks: weights were changed on some of them, and differ now.
    """
    reducer, comm = parts.reducer, parts.comm
    optimizers, unheld = ((), set()) if update is None else (update.optimizers, update.unheld)
    if update is None:
        reducer.forget()
    else:
        reducer.expect(update.optimizers, scaled=scale is not None)
    counts = parts.statistics.step_begins()
    reducer.look(wanted=update is not None and scale is None and not loss.is_finite)
    used = [here and index not in unheld for index, here in enumerate(reducer.launch())]
    agreed, settings = _agree(parts, loss, optimizers, used, counts, stop=stop)
    reduction = reducer.reduce(agreed.used)
    for index in unheld:  # they do not count in the norm
        reducer.parameters[index].grad = None
    norm = None
    # From here on gradients, loss and weight are used up, also when a user's hook raises.
    try:
        if parts.watch is not None:
            parts.watch.refuse_unlike(agreed, settings, _NOT_UPDATED)
        total_loss, total_weight = torch.tensor(0.0, dtype=torch.float64), 0.0
        if not agreed.discard:  # the user's training loop, which discards, gives no loss
            total_loss, total_weight = loss.over_ranks(comm, agreed.loss)
        # The weight of the sum in `.grad`: the global batch's, or only this rank's part of it.
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
    """Send the step's small message; returns it and this rank's settings (it has their digest)."""
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
    """Turn the sum of gradients into new weights; returns the norm before clipping."""
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
