"""The handle of a replicated model: leaf after leaf, then the step (see `step.py`).

[Note: Mean or sum] A step divides once, by the targets of the whole global batch, so it needs each
leaf's *sum*. A mean, the default of torch's loss functions, is multiplied by the number of targets
it was taken over: with `reduction="mean"`, loss = mean x weight. For cross-entropy and `.mean()`
this gives the sum's gradient bit for bit (weight / weight is 1). For `mse_loss` and similar losses
it is equal up to rounding, because they divide by the number of elements first.

The autograd graph shows a mean that is used as a sum. Torch names a graph's nodes and their saved
values without documenting the names; the tests go through all losses of `torch.nn.functional`. A
loss that is not recognised causes no warning.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import saved, version
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.gloo_group import wait_until_workers_sleep
from gradsync.sync.batch_norm import BatchNormHandling, choose_batch_norm
from gradsync.sync.buffers import BufferSync
from gradsync.sync.reducer import Reducer, StragglerWatch
from gradsync.sync.state_methods import StateMethods
from gradsync.sync.step import (
    Optimizers,
    StepCall,
    StepParts,
    StepResult,
    Update,
    each_optimizer,
    settings_of_step,
    take_step,
)
from gradsync.sync.step_metadata import LossSum
from gradsync.sync.user_loop import UserLoop, UserLoopMethods, refuse_ddp_around
from gradsync.sync.watch import ReplicaWatch, optimizer_watch, refuse_closure

if TYPE_CHECKING:
    from torch import nn

_CHANGED_SUMS = (
    "gradients were cleared or replaced between sync.backward() and the end of the step, which is "
    "sync.step(): it clears them itself, so leave zero_grad() out (or call it before the first "
    "leaf), and clip by sync.step(optimizer, clip_norm=...)"
)
_OTHER_GRADIENTS = (
    "a parameter of shape {} has a gradient that sync.backward() did not make: by loss.backward() "
    "(a penalty?), by hand, or left over. It would be added once on each rank. Add a penalty to "
    "the loss of each leaf (reduction='mean': loss + penalty); clear what is left over with "
    "optimizer.zero_grad() before the step's first sync.backward()"
)
_SCALES = (
    "give one GradScaler as scale= to each sync.backward() of a step and to its sync.step(): it "
    "was given to only some of them, and gradients would be too large or too small"
)
_NO_MEAN_LOSS = (
    "sync.mean_loss is nan: in a loop with loss.backward() the handle does not see the loss. "
    "Average it yourself with gs.all_reduce, or use sync.backward() and sync.step()"
)
_OUTSIDE = (
    "enclose forward and backward of each leaf in "
    "`with sync.micro_step(last=leaf.is_last, index=leaf.index):`"
)
_NO_SCALER = (
    "cannot work with a GradScaler: a gradient that is not finite would stay in what it remembers; "
    "use bf16, or another strategy"
)
HANDLE = "_gradsync"
"""Attribute of a model that refers to its handle; hooks do not keep the handle alive."""


class GradientSync(UserLoopMethods, StateMethods):
    """Handle of a replicated model, made by `gs.replicate`.

    In each step call `backward` for each leaf, then `step` once. In the user's training loop:
    `loss.backward()`, `finish()`, `optimizer.step()`.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        reducer: the strategy.
        batch_norm: from `choose_batch_norm`; None for models without BatchNorm.
        number: number of the model in this process, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        reducer: Reducer,
        batch_norm: BatchNormHandling | None = None,
        *,
        number: int = 0,
    ) -> None:
        self.model, self.comm, self.reducer = model, comm, reducer
        if not reducer.parameters:
            raise RunError("the model has no trainable parameter: nothing to synchronise")
        self._loss = LossSum(reducer.parameters[0].device)
        self._check_mean = MeanCheck(said=comm.rank == 0)
        self._last = self._failed = False
        self._index: int | None = None
        self._scale: Any = None
        self._said_no_loss = False
        self._result: StepResult | None = None
        shards = reducer.shards
        handling = batch_norm or choose_batch_norm(model, comm, None)
        self._buffers = BufferSync(model, comm, handling, equal_replicas=shards.equal_replicas)
        watch = ReplicaWatch(model, comm, equal=shards.whole_parameters and shards.equal_replicas)
        self._stragglers = StragglerWatch(comm)
        self._parts = StepParts(reducer, comm, self._buffers, number, self._stragglers, watch)
        self._user_loop = UserLoop(model, self._parts, watch)
        self._ddp_watch = refuse_ddp_around(model, reducer)
        self._sums = _Sums(reducer.parameters)

    @property
    def mean_loss(self) -> float:
        """Global mean loss of the last `step`. It is nan before the first step and in the user's
        training loop, whose losses are not known. Waits for the device."""
        if self._result is None and self._user_loop.finished and not self._said_no_loss:
            self._said_no_loss = True
            log.warning(_NO_MEAN_LOSS)
        return float("nan") if self._result is None else float(self._result.mean_loss)

    @property
    def forward(self) -> Any:
        """Call this in place of the model: `logits = sync.forward(inputs)`.

        Strategies that work by hooks do not need it; for them it only calls the model.
        """
        return self.reducer.forward

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Run a throwaway backward before the first step. Some strategies group sums by the first
        backward, so without this a resumed run would have other bits."""
        with self._buffers.untouched():
            self.reducer.prime(forward_backward)

    @contextmanager
    def micro_step(self, *, last: bool, index: int | None = None) -> Generator[None]:
        """Enclose forward and `backward` of one leaf.

        Needed by strategies that must know before the forward (`ddp`, `powersgd`, `fsdp`). It does
        no harm with others, which learn here what the `leaf` of `backward` would tell them.

        Args:
            last: `leaf.is_last` of the loader: no leaf follows, so communication may begin.
            index: `leaf.index` of the loader, see `backward`.
        """
        self._last, self._index = last, index
        self._stragglers.leaf_begins()
        self._user_loop.in_micro_step = True
        try:
            with self.reducer.micro_step(last=last):
                yield
        finally:
            self._last, self._index = False, None
            self._stragglers.leaf_ends()
            self._user_loop.in_micro_step = False

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        leaf: Any = None,
        reduction: str | None = None,
        scale: Any = None,
    ) -> None:
        """Run the backward of one leaf. Discards gradients for models of other handles.

        Args:
            loss: *summed* over the leaf's targets, []; or their mean, see `reduction`.
            weight: number of these targets (0 for a leaf that is all padding); None is
                `leaf.num_targets`.
            leaf: from `gs.loader`. Its `is_last` lets communication begin in this backward. Its
                `index` lets `invariant` add up leaves immediately instead of keeping each.
            reduction: "sum", or "mean" if `loss` is the mean over the `weight` targets (a mean over
                no targets counts as nothing). None is "sum", and warns once if the loss looks like
                a mean (docs/guide/training-loop.md).
            scale: a `torch.amp.GradScaler`, for fp16.

        Raises:
            TypeError: neither weight nor leaf; a loss that is no tensor.
            ConfigError: a weight that is not a finite number >= 0; an unknown reduction; no
                enclosing `micro_step` although the strategy needs it; the last backward raised and
                `discard` was not called; the handle is closed.
        """
        last, index = (self._last, self._index) if leaf is None else (leaf.is_last, leaf.index)
        weight = leaf_weight(weight, leaf)
        self._refuse_if_failed()
        if self.reducer.needs_micro_step and not self._user_loop.in_micro_step:
            raise ConfigError(f"sync={self.reducer.strategy!r}: {_OUTSIDE}")
        loss_sum = to_sum(loss, weight, reduction)
        self._check_mean(loss, weight, leaf, reduction=reduction)
        nothing = reduction == "mean" and not weight
        self._sums.check()
        self._check_scale(scale)
        self._scale = scale
        self._buffers.leaf_begins(last=last)
        root = loss_sum if scale is None else scale.scale(loss_sum)
        with (
            self._user_loop.enclosed(root),
            self.reducer.leaf(last=last, index=index),
            counts_for_nothing(loss) if nothing else nullcontext(),
        ):
            self._user_loop.leaves += 1
            self._failed = True  # until backward succeeds
            root.backward()
        self._failed = False
        self._buffers.leaf_ends(counts=weight > 0)
        self._loss.add(loss_sum, weight, leaf)
        self._sums.note()
        if (ended := getattr(leaf, "backward_ended", None)) is not None:
            ended()

    def step(
        self,
        optimizer: Optimizers,
        *,
        clip_norm: float | None = None,
        stop: bool = False,
        scale: Any = None,
    ) -> StepResult:
        """Synchronise, divide once, clip, update, and clear the gradients.

        Args:
            optimizer: over the model's parameters, or a list of optimizers over different ones:
                `[muon, adamw]`. Parameters in none of them do not change; their gradients are
                dropped.
            clip_norm: largest L2 norm of the mean gradient of all updated parameters together; None
                does not clip.
            stop: whether this rank asks to stop; the result's `stop` is the same on all ranks.
            scale: the `torch.amp.GradScaler` given to `backward`.

        Raises:
            ConfigError: on all ranks, before any update: optimizers, hyper-parameters, `clip_norm`
                or orders of samples (`leaf`) differ between ranks; a parameter is in two optimizers
                or not in this model; the strategy cannot shard an optimizer; `scale` under a
                strategy that cannot skip a step; no rank had a backward since the last step;
                `loss.backward()` instead of `sync.backward`; a parameter was added or became
                trainable after `gs.replicate`; and see `backward`.
            RunError: on all ranks, before any update: weights changed since the last step on some
                ranks, and differ.
        """
        reducer, optimizers = self.reducer, each_optimizer(optimizer)
        self._refuse_if_failed()
        for each in optimizers:
            refuse_closure(each)
            self._user_loop.untracked.check(each, own_step=False)
        if not self._user_loop.leaves and self._user_loop.pending:
            raise ConfigError(
                "loss.backward() is followed by optimizer.step(); sync.step(optimizer) needs "
                "sync.backward(loss_sum, weight=...), which says how many targets the loss counts"
            )
        self._sums.check(last=True)
        self._check_scale(scale)
        if scale is not None and not reducer.shards.takes_scaler:
            raise ConfigError(f"sync={reducer.strategy!r} {_NO_SCALER}")
        call = StepCall(
            loss=self._loss,
            update=Update(reducer, optimizers),
            settings=settings_of_step(self._parts, optimizers, clip_norm),
            enclosed=self._user_loop.enclosed,
            clip_norm=clip_norm,
            stop=stop,
            scale=scale,
        )
        result = self._end_step(call)
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        return result

    def discard(self) -> None:
        """Discard this step's gradients; call it in place of `step` (or `finish`).

        For a rank whose forward or backward raised, or that must skip this step. All ranks must
        reach the end of the step, by this call or by the usual one; then none of them updates.
        Torch's own DDP (`ddp`, `powersgd`) cannot continue after a backward that raised.
        """
        self._refuse_if_closed()
        if self._user_loop.pending and not self._user_loop.leaves:
            self._user_loop.discard()
            return
        if self._failed:
            self._buffers.leaf_ends(counts=False)
        self._failed = False
        self._end_step(StepCall(loss=self._loss, discard=True, settings={}))  # not compared
        self._user_loop.step_ends(discarded=True)

    def _end_step(self, call: StepCall) -> StepResult:
        """Take the step, then reset."""
        try:
            self._result = take_step(self._parts, call)
        finally:
            self._sums.forget()
            if not self._loss.num_leaves:
                self._user_loop.leaves = 0
        return self._result

    def _check_scale(self, scale: Any) -> None:
        if self._user_loop.leaves and scale is not self._scale:
            raise ConfigError(_SCALES)

    def _refuse_if_failed(self) -> None:
        self._refuse_if_closed()
        if self._failed:
            raise ConfigError(
                "the last sync.backward() raised, so this step's gradients are not whole: call "
                "sync.discard() in place of step() (then no rank updates anything)"
            )

    def close(self) -> None:
        """Remove the hooks from the model, which stays usable.

        Called before `destroy_process_group`, it also lets gloo's workers finish. A worker that
        needs Python's lock when the interpreter ends would abort the process.
        """
        self._user_loop.close()
        self._ddp_watch.remove()
        self.reducer.close()
        self._buffers.close()
        for part in self.model.modules():
            if part.__dict__.get(HANDLE) is self:
                del part.__dict__[HANDLE]
        others = [listener.comm for listener in optimizer_watch().present()]
        own = (SharedMemoryCommunicator, ProcessGroupCommunicator)
        if isinstance(self.comm, own) and self.comm not in others:
            self.comm.close()
        if self.comm.world_size > 1:
            wait_until_workers_sleep()

    def __deepcopy__(self, memo: object) -> None:
        """Give a copy of the model no handle, because the copy is not synchronised."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Give a saved model no handle, as with copies."""
        return (type(None), ())


class _Sums:
    """Notices gradients that `GradientSync.backward` did not make, and sums of a step's leaves that
    were cleared or replaced. Before a step's first leaf there are no gradients, and never any if
    leaves are summed elsewhere, as along the tree."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self.forget()

    def note(self) -> None:
        """Remember the gradients after a leaf."""
        self._noted = self._now()

    def forget(self) -> None:
        """Begin another step."""
        self._noted = [None] * len(self._parameters), []

    def check(self, *, last: bool = False) -> None:
        """Raise ConfigError if gradients changed. After the `last` leaf communication may change
        them, so only replaced gradients are noticed."""
        (before, versions), (now, versions_now) = self._noted, self._now()
        if all(map(operator.is_, before, now)) and (last or versions == versions_now):
            return
        for known, grad in zip(before, now, strict=True):
            if known is None and grad is not None:
                raise ConfigError(_OTHER_GRADIENTS.format([*grad.shape]))
        raise ConfigError(_CHANGED_SUMS)

    def _now(self) -> tuple[list[Any], list[int]]:
        grads = [p.grad for p in self._parameters]
        return grads, [version(grad) for grad in grads if grad is not None]


# -- a leaf's loss --------------------------------------------------------------------------------

log = logging.getLogger("gradsync")

_MEAN = 1
"""The `reduction` that a loss's node stores: 0 none, 1 mean, 2 sum."""
_LOOKED_AT = 100
"""Number of a graph's nodes that are searched for a mean."""
_PASSED = ("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Squeeze")
"""Operations between losses and the argument of `backward`: weighted sums, casts, reshapes."""


def leaf_weight(weight: float | Tensor | None, leaf: Any) -> float:
    """Weight of a leaf, a finite number >= 0: `weight`, or the leaf's number of targets."""
    if weight is None:
        if leaf is None:
            raise TypeError("backward() needs weight= (the number of targets) or leaf=")
        weight = leaf.num_targets
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise ConfigError(f"backward(weight=...) must be a finite number >= 0, got {weight}")
    return weight


def to_sum(loss: Tensor, weight: float, reduction: str | None) -> Tensor:
    """Convert a leaf's loss, [], to the sum over its `weight` targets, see [Note: Mean or sum];
    `reduction` None is "sum"."""
    if reduction not in (None, "sum", "mean"):
        raise ConfigError(f"backward(reduction=...) must be 'sum' or 'mean', got {reduction!r}")
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"backward() needs the loss's tensor (without .item()), got {type(loss).__name__}"
        )
    if loss.dim() and loss.numel() == 1:
        loss = loss.reshape(())
    if reduction != "mean":
        return loss
    return loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0


@contextmanager
def counts_for_nothing(loss: Tensor) -> Generator[None]:
    """Enclose the backward of a mean over nothing: every gradient in its graph becomes zero, since
    0 / 0 would make it nan. Backward must still run, because torch's DDP and FSDP communicate in
    it."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [inner for inner, _ in node.next_functions]
    hooks = [node.register_prehook(_zeros) for node in seen]
    try:
        yield
    finally:
        for hook in hooks:  # a parameter's node outlives the graph
            hook.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


class MeanCheck:
    """Warns, once and on one rank (`said`), of a mean that is used as a sum, or that was taken over
    another number of targets than its weight. Checks only the first leaves, since the form of a
    program's loss does not change."""

    def __init__(self, *, said: bool) -> None:
        self._leaves_left = 8 if said else 0

    def __call__(self, loss: Tensor, weight: float, leaf: Any, *, reduction: str | None) -> None:
        """Check a leaf's `loss`, [], that counts `weight` targets, before its backward."""
        if not self._leaves_left or weight <= 1 or reduction == "sum":
            return  # the mean of one target is the sum
        self._leaves_left -= 1
        wrong = _wrong_count(loss, weight) if reduction else _taken_for_a_sum(loss, weight, leaf)
        if wrong:
            self._leaves_left = 0
            log.warning(wrong + " (said once)")


def _taken_for_a_sum(loss: Tensor, weight: float, leaf: Any) -> str:
    found = list(_reductions(loss, (weight, getattr(leaf, "num_samples", weight))))
    # Torch's own losses decide: a penalty that is added to them may be a mean.
    means = [mean for node, mean in found if saved(node, "reduction") is not None]
    means = means or [mean for _, mean in found]
    # One mean per target, added over the samples, is a sum.
    if not all(means) or not 0 < len(means) < weight:
        return ""
    who = f"weight={weight:g}" if leaf is None else "leaf=leaf"
    return (
        "this loss is a mean, and sync.backward expects a sum (sync.step divides by all targets of "
        f"the global batch): write sync.backward(loss, {who}, reduction='mean'), or give the loss "
        "function reduction='sum'; if the loss is right as it is, sync.backward(..., "
        "reduction='sum') ends this warning"
    )


def _wrong_count(loss: Tensor, weight: float) -> str:
    found = [node for node, mean in _reductions(loss) if mean and "NllLoss" in node.name()]
    if len(found) != 1:
        return ""
    counted = saved(found[0], "total_weight")  # in the dtype of the logits, and rounded to it
    rounding = max(1e-5, 2 * torch.finfo(counted.dtype).eps)
    if math.isclose(float(counted), weight, rel_tol=rounding):
        return ""
    return (
        f"the mean of this loss was taken over {float(counted):g} (targets that are not ignored, "
        f"or their class weights), but it counts for {weight:g}: give sync.backward the number as "
        "weight=, as in weight=(labels[:, 1:] != -100).sum() where a language model shifts its "
        "labels"
    )


def _reductions(loss: Tensor, counts: Sequence[float] = ()) -> Iterator[tuple[Any, bool]]:
    """The reductions that `loss`, [], is a weighted sum of: nodes, and whether each is a mean.

    Division by one of `counts` makes a mean; division by 2, as in `x.square().sum() / 2`, does not.
    """
    nodes = [loss.grad_fn]
    for _ in range(_LOOKED_AT):
        node = nodes.pop() if nodes else None
        if node is None:
            continue
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if reduction := saved(node, "reduction"):
            yield node, reduction == _MEAN
        elif name == "Sum" or (name == "Mean" and (saved(node, "self_sym_numel") or 0) > 1):
            yield node, name == "Mean"
        elif name == "Div" and (divisor := _divisor(node)) in counts and divisor > 2:
            yield node, True
        elif name in _PASSED:
            nodes += [inner for inner, _ in node.next_functions]


def _divisor(node: Any) -> float:
    other = saved(node, "other")
    one = not isinstance(other, Tensor) or other.numel() == 1
    return 0.0 if other is None or not one else float(other)
