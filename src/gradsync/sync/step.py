"""The end of a step, for every strategy and loop: its phases in order.

    collect    end this rank's micro-batches; every gradient is in its place in the sums
    agree      one small message: loss, weight, stop, discard, which rank used which parameter
    reduce     the slices that this rank owns become the sum over ranks, divided once
    clip       the exact norm, over fixed blocks in parameter order
    update     the optimizer, on owned slices
    publish    weights are whole on every rank again

[Note: Exact global mean] A rank's micro-steps add up gradients of *summed* losses. At the step's
end one small all-reduce makes (loss sum, weight) global, and the strategy makes the gradients
global sums. Both are divided once by the global weight. So the mean is exact for unequal token
counts, padding (weight 0), unequal shares and ranks without data; no mean of means is involved.

In the user's training loop (`loss.backward()`, `optimizer.step()`) no weight is known. The divisor
is the number of ranks, as in torch's DDP, and the step ends with the reduction.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.buffers import BufferSync
from gradsync.sync.check_replicas import first_difference
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.step_metadata import (
    NO_LOSS,
    NUM_BINS,
    LossSum,
    Settings,
    StepMetadata,
    agree_on_metadata,
    from_bins,
    mark_of,
    settings_of,
)
from gradsync.sync.watch import ReplicaWatch, Stopwatch, StragglerWatch, refuse_replaced, shapes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gradsync.runtime.recovery import Recovery

log = logging.getLogger("gradsync")

NOT_UPDATED = (
    "no rank has updated its weights; give all ranks the same (a scheduler that looks at a loss: "
    "sync.mean_loss)"
)
_OTHER_ORDER = (
    "no rank has updated its weights; ranks share one order of one data set, and take its steps "
    "together: give gs.loader equal arguments and data on all ranks, which it divides among them, "
    "or assign dataset.fingerprint, a text, where content differs and samples do not"
)
_OTHER_BUFFERS = (
    "no rank has updated its weights; set buffers between steps on all ranks alike, and give what "
    "differs from micro-batch to micro-batch to the forward"
)
_NO_BACKWARD = (
    "step() came without a backward on any rank since the last step, which used up all gradients: "
    "sync.backward comes on every rank, for each of its micro-batches; several optimizers after "
    "one backward are one call, sync.step([a, b]); several models in one backward are one handle, "
    "gs.replicate(torch.nn.ModuleList([a, b]))"
)


@dataclass(frozen=True, slots=True)
class StepParts:
    """Objects that take part in every step of one model."""

    reducer: Reducer
    comm: Communicator
    buffers: BufferSync
    number: int
    """Number of the model, the same on all ranks; see `agree_on_metadata`."""
    stragglers: StragglerWatch | None = None
    """None if ranks do different things in a step, as a pipeline's stages do."""
    watch: ReplicaWatch | None = None
    """None if ranks hold parts of a model: then neither weights nor optimizers are compared."""
    recovery: Recovery | None = None
    """Of a run that goes on after a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """What this rank asks of a step."""

    loss: LossSum | None
    """Loss and weight of this rank's micro-batches; None in the user's training loop."""
    update: Update | None = None
    """The optimizers; None to discard, and if the user's training loop runs them."""
    discard: bool = False
    """Discard all ranks' gradients."""
    late: bool = False
    """Whether the optimizer's own step makes this call, see user_loop.py."""
    settings: Settings
    """Compared on all ranks before any update."""
    why: str = NOT_UPDATED
    """Consequence of different settings, for the message."""
    enclosed: Callable[[], AbstractContextManager[None]] = nullcontext
    """Encloses the optimizer's own step, in which hooks must do nothing."""
    clip_norm: float | None = None
    stop: bool = False
    scale: Any = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm >= 0:  # nan too
            raise ConfigError(f"clip_norm must be a number >= 0, or None; got {self.clip_norm}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one optimizer step, equal on all ranks."""

    mean_loss: Tensor
    """Loss per target over the global batch, float64 [] on the model's device."""
    weight: float
    """Number of targets (or samples) in the global batch."""
    grad_norm: Tensor | None
    """L2 norm of the mean gradient before clipping, [] ; None without clipping. Under strategies
    that step alone (`local_sgd`, `diloco`) it is this rank's own norm."""
    stop: bool
    """True if any rank asked to stop."""
    exposed: Stopwatch = field(repr=False)
    """Communication on this rank that nothing overlapped."""
    discarded: bool = False
    """True if a rank called `discard`; then no rank has updated."""
    had_gradients: bool = True
    """False if no rank had a gradient for any parameter."""
    late: bool = False
    """Whether any rank's `StepCall` was late."""
    rank_waits: bool = False
    """Under `gs.init(on_loss="shrink")`: whether a lost rank was started again, and waits for
    `gs.save` to join after it."""


def take_step(parts: StepParts, call: StepCall) -> StepResult:
    """Synchronise, and update unless the user's training loop does so or a rank discards the step.

    Raises:
        ConfigError: on all ranks: no rank had a backward, or ranks step with different optimizers.
        RunError: on all ranks: weights were changed on some ranks, and differ now.
    """
    reducer, shards, loss = parts.reducer, parts.reducer.shards, call.loss
    optimizers = () if call.update is None else call.update.optimizers
    unheld = set() if call.update is None else call.update.unheld

    # collect
    if not call.discard:
        shards.prepare(optimizers, scaled=call.scale is not None)
    counts = parts.buffers.step_begins()
    reducer.collect(discard=call.discard, user_loop=loss is None)
    _warn_of_non_finite(reducer, call)
    used = [here and index not in unheld for index, here in enumerate(reducer.launch())]

    # agree
    began = time.perf_counter()
    agreed = agree_on_metadata(parts.comm, _metadata(parts, call, used, counts))
    met_s = time.perf_counter() - began
    total_weight = _weight_over_ranks(parts, call, agreed)
    # If every rank steps alone, `.grad` holds this rank's sum, to be divided by its weight.
    alone = loss is not None and not shards.equal_replicas
    weight = loss.weight if alone and loss is not None else total_weight
    skip = agreed.discard or not weight  # no rank updates

    # reduce: divides the sums, once
    exposed = reducer.reduce(agreed.used, None if skip else weight)
    # Here no rank can have raised alone.
    if parts.stragglers is not None:
        parts.stragglers.step_ends(exposed, met_s, 0 if loss is None else loss.num_micro_batches)
    for index in unheld:  # they do not count in the norm
        reducer.parameters[index].grad = None
    norm, failed = None, True
    try:
        _refuse_unlike(parts, agreed, call)
        mean_loss = _mean_loss(parts, call, agreed, total_weight)
        if parts.recovery is not None:  # after this line there are no more messages
            _refuse_moving_buffers(agreed)
            parts.recovery.commit(parts.comm.barrier)
        if call.update is not None and not skip:
            norm = _clip_and_update(reducer, call.update, call)
        failed = False
    finally:
        # Gradients, loss and weight are used up, even if a user's hook raises.
        if loss is not None:
            loss.clear()
        if loss is not None or agreed.discard or failed:
            for parameter in reducer.parameters:
                parameter.grad = None
    parts.buffers.step_ends(() if agreed.discard else agreed.counts, shards.under_way)

    # publish: waits here, since code between two steps may read weights
    if loss is not None:
        try:
            with call.enclosed():  # schedulers and hooks run in here
                shards.publish().wait()
        finally:
            if parts.watch is not None and not agreed.discard:
                parts.watch.remember(*optimizers)
    return StepResult(
        *(mean_loss, total_weight, norm, agreed.stop, exposed),
        discarded=agreed.discard,
        had_gradients=any(agreed.used),
        late=agreed.late,
        rank_waits=agreed.rank_waits,
    )


def _metadata(
    parts: StepParts, call: StepCall, used: list[bool], counts: Sequence[int]
) -> StepMetadata:
    """What this rank tells the others."""
    loss, watch, recovery = call.loss, parts.watch, parts.recovery
    order, dealt = ("", 0.0) if loss is None else loss.source()
    return StepMetadata(
        used=used,
        counts=counts,
        loss=NO_LOSS if loss is None else loss.message(),
        dealt=dealt,
        stop=call.stop,
        discard=call.discard,
        changed=watch is not None and watch.changed(),
        late=call.late,
        rank_waits=recovery is not None and parts.comm.rank == 0 and recovery.one_waits(),
        marks={
            "model": parts.number,
            "data": mark_of(order.encode()) if order else None,
            "settings": mark_of(json.dumps(call.settings).encode()),
            "weights": None if watch is None else watch.sample,
            "buffers": parts.buffers.mark,
        },
    )


def _warn_of_non_finite(reducer: Reducer, call: StepCall) -> None:
    """Warn about nan or inf in this rank's gradients. Checks large gradients only if the loss is
    not finite or not known."""
    non_finite, on_cuda = reducer.non_finite, reducer.parameters[0].is_cuda
    large = on_cuda or call.loss is None or not call.loss.is_finite
    due = non_finite.is_due(on_cuda=on_cuda) and not call.discard and call.scale is None
    if due and (large or reducer.own_gradients):
        parts = reducer.gradient_memory(large=large)
        non_finite.look(parts, reducer.named_gradients)
    non_finite.step_ends(reducer.comm.rank)


def _refuse_unlike(parts: StepParts, agreed: StepMetadata, call: StepCall) -> None:
    """Raise on all ranks if their batch, settings, weights or buffers differ. Rank 0 warns if the
    batch is not the one that the loader provided."""
    if agreed.discard:
        return
    model, known = parts.reducer.model, parts.reducer.parameters
    if not any(agreed.used) and parts.reducer.shards.whole_parameters:
        # Rare, so it may search the whole model: a replacement parameter has no hook.
        refuse_replaced(model, {id(p) for _, p in trainable(model)} - set(map(id, known)))
    order = ""
    if call.loss is not None:
        order, _ = call.loss.source()
        if parts.comm.rank == 0:
            call.loss.warn_of_data(agreed.dealt)
    texts: dict[str, Callable[[], Settings]] = {
        "data": lambda: {"gs.loader": order or "no micro-batch"},
        "settings": lambda: call.settings,
        "buffers": parts.buffers.texts,
    }
    whys = {"data": _OTHER_ORDER, "settings": call.why, "buffers": _OTHER_BUFFERS}
    for name in (name for name in texts if name in agreed.unlike):
        if said := first_difference(parts.comm, texts[name]()):
            raise ConfigError(f"{said}; {whys[name]}")
    if parts.watch is not None:
        optimizers = () if call.update is None else call.update.optimizers
        parts.watch.refuse_unlike(optimizers, changed=agreed.changed)


def _refuse_moving_buffers(agreed: StepMetadata) -> None:
    """Raise on all ranks if a forward changed a buffer: ranks combine these after the update."""
    if any(agreed.counts):
        raise ConfigError(
            "on_loss='shrink' cannot keep buffers that a forward changes (BatchNorm's statistics): "
            "batch_norm='freeze', or on_loss='end' and a restart from a checkpoint"
        )


def _weight_over_ranks(parts: StepParts, call: StepCall, agreed: StepMetadata) -> float:
    """Divisor of the sums: the global batch's weight, or the number of ranks if it is unknown."""
    if agreed.discard:
        return 0.0
    if call.loss is not None:
        return from_bins(agreed.loss[:NUM_BINS])
    return float(parts.comm.world_size if any(agreed.used) else 0)


def _mean_loss(
    parts: StepParts, call: StepCall, agreed: StepMetadata, total_weight: float
) -> Tensor:
    """Global mean loss, float64 []; nan if there is no loss."""
    if agreed.discard:
        log.warning("a rank threw this step's gradients away: no rank updates its weights")
    elif call.loss is not None:
        if not total_weight and not any(agreed.used):
            raise ConfigError(_NO_BACKWARD)
        return call.loss.over_ranks(parts.comm, agreed.loss)[0] / total_weight
    return torch.tensor(float("nan"), dtype=torch.float64)


def _clip_and_update(reducer: Reducer, update: Update, call: StepCall) -> Tensor | None:
    """Turn the mean gradient into new weights; returns its norm before clipping."""
    if call.scale is not None:
        call.scale.unscale_(update)
    norm = None if call.clip_norm is None else reducer.shards.clip(call.clip_norm)
    with call.enclosed():
        update.step() if call.scale is None else call.scale.step(update)
    if call.scale is not None:
        call.scale.update()
    return norm


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several that hold different parameters."""


def each_optimizer(optimizers: Optimizers) -> list[Optimizer]:
    """Convert `optimizers` to a list.

    Raises:
        ConfigError: the list is empty.
    """
    found = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    if not found:
        raise ConfigError("expected at least one optimizer, got an empty list")
    return found


class Update:
    """All optimizers of a step as one. A GradScaler treats it as an optimizer, so that a gradient
    that is not finite prevents all their steps.

    Args:
        reducer: of the model.
        optimizers: hold different parameters; gradients of parameters in none of them are dropped.

    Raises:
        ConfigError: two optimizers hold the same parameter, or one holds none of the model's.
    """

    def __init__(self, reducer: Reducer, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for o in optimizers for group in o.param_groups]
        self._shards = reducer.shards
        held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
        either = set().union(*held)
        if len(either) < sum(map(len, held)):
            named = reducer.model.named_parameters()
            names = [name for name, p in named if sum(id(p) in ids for ids in held) > 1]
            raise ConfigError(
                f"parameter {names[0] if names else '(not of this model)'!r} is in two of the "
                "optimizers given to sync.step(), which would update it twice: give it to one"
            )
        known = reducer.parameters
        for optimizer, ids in zip(optimizers, held, strict=True):
            if ids.isdisjoint(map(id, known)):
                raise ConfigError(
                    "an optimizer given to sync.step() holds none of this model's parameters, but "
                    f"others {shapes(optimizer)}; make it after gs.replicate, over the model's own"
                )
        self.unheld = {index for index, p in enumerate(known) if id(p) not in either}
        """Indices in `reducer.parameters` of the parameters that no optimizer holds."""

    def step(self) -> None:
        """Do one step with the mean gradient."""
        self._shards.update(self.optimizers)


def settings_of_step(
    parts: StepParts, optimizers: Sequence[Optimizer], clip_norm: float | None
) -> Settings:
    """Settings that must be equal on all ranks of a `sync.step`: clip_norm, optimizers, states."""
    settings: Settings = {}
    if parts.watch is not None and parts.comm.world_size > 1:
        settings = {"the call": "sync.step()"}
        settings["clip_norm"] = str(None if clip_norm is None else float(clip_norm))
        for number, optimizer in enumerate(optimizers):
            settings |= settings_of(optimizer, parts.reducer.parameters, number=number)
            settings[f"the state of optimizer {number}"] = parts.watch.state_of(optimizer)
    return settings
