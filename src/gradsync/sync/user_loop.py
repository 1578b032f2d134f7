"""Synchronisation in the user's training loop: `loss.backward()`, then `optimizer.step()`.

As with torch's DDP the gradients are averaged over ranks when backward returns. So clipping and any
other code between backward and the optimizer sees the mean. [Note: Who synchronises when]

    backward on this rank       its end launches the remaining buckets and waits
    no backward on this rank    the optimizer's step (a hook on it) or `finish()` takes part,
                                with zeros; otherwise the other ranks would hang. In the step it
                                is too late for clipping: then no other rank may clip
    backward under no_sync()    adds up; the next backward without it synchronises all of it,
                                and so does an optimizer step that comes first
    backward that raised        `discard()` takes part, and no rank uses the gradients
    sync.backward() of another  yields no gradients here: those for this model's parameters are
    handle, through this model  discarded at once (a generator's loss, through the discriminator)

[Note: States] What a rank's gradients are, and what leads from one state to another:

    NONE ──► SUMS ──► NONE                   sync.backward, sync.step
    NONE ──► BACKWARD ──► OWN ──► MEAN       loss.backward(), its end, the sum over ranks
                           └────► DISCARDED  this rank's discard()
                           └────► LOST       another rank's
    NONE ──► DROPPED                         another handle's backward
    MEAN, DISCARDED, LOST, DROPPED           begin the next step as NONE does

A missing backward shows in gradients that an optimizer has already used, or that were cleared.
Enter `no_sync` before the forward: torch's DDP and FSDP decide there, and a program that enters it
later drifts silently. The order is checked here too, so a loop works under every strategy.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import ModuleList

from gradsync.core.torch_private import (
    active_ddp,
    at_the_end_of_backward,
    current_graph_task,
    version,
)
from gradsync.errors import ConfigError, GradsyncError
from gradsync.sync.check_replicas import IN_DDP
from gradsync.sync.reducer import gone
from gradsync.sync.step import StepCall, StepParts, take_step
from gradsync.sync.step_metadata import settings_of
from gradsync.sync.watch import ModuleHook, ReplicaWatch, UntrackedParameters, optimizer_watch

if TYPE_CHECKING:
    from torch import nn

_PLAIN = (
    "a backward that is not sync.backward() reached this model in sync.micro_step(), or between "
    "sync.backward() and sync.step(), whose gradients it would change. Write sync.backward(loss, "
    "micro_batch) there and sync.step(optimizer) after the last one"
)
_OTHERS = (
    "another handle's sync.backward() reached this model between its own backward and its step, or "
    "without one of its own; it keeps gradients of its own model only: step before it, or "
    "replicate models that one backward trains together: gs.replicate(torch.nn.ModuleList([a, b]))"
)
_TOO_LATE = (
    "enclose forward and backward of a micro-batch together (or set require_backward_grad_sync "
    "before the forward)"
)
_REENTRANT = (
    "activation checkpointing with use_reentrant=True runs a backward inside of the backward, and "
    "its end cannot be told from the whole one's; use use_reentrant=False"
)
_OWN_STEP = (
    "sync.backward() is followed by sync.step(optimizer), not by optimizer.step() or "
    "sync.finish(), which belong to loss.backward(): nobody has divided these gradients yet"
)
_FAILED = (
    "the last backward ended with an error, and other ranks may be waiting for its gradients: call "
    "sync.discard() first (then no rank uses this step's)"
)
_TOO_LATE_TO_CHANGE = (
    "gradients were changed between loss.backward() and optimizer.step() (clipped?), but a rank "
    "without a backward in this step gets them in optimizer.step() only, so that weights would "
    "drift apart: call sync.finish() before it, on all ranks (after a backward it does nothing)"
)
_STEP_IN_BACKWARD = (
    "optimizer.step() was called during a backward, by a hook on a parameter, before gradients are "
    "averaged. Step after it; with an optimizer for each layer, by sync.step([a, b, ...])"
)
_FOREIGN = (
    "works through sync.backward and sync.step only (an optimizer's own step would let ranks drift "
    "apart); in a loop of your own use strategy='invariant', 'bucketed', 'naive' or 'fsdp'"
)
_DRIFTED = (
    "so their last steps differed, and their weights do: go back to a checkpoint from before. Step "
    "with the same on all ranks, as often for as many backwards: enclose all micro-batches of a "
    "step but the last in sync.no_sync()"
)

_FLAG = "require_backward_grad_sync"  # torch's DDP has the same name; set on the model
_STEPS = "number of optimizer.step() since the last synchronisation"
_THE_CALL = {"the call": "loss.backward() or optimizer.step()", _STEPS: "0"}


class State(Enum):
    """What this rank's gradients are; see [Note: States]."""

    NONE = auto()  # there are none, or `sync.step` has used them
    SUMS = auto()  # made by `sync.backward`, for `sync.step`
    BACKWARD = auto()  # a `loss.backward()` is running, or has raised
    OWN = auto()  # made by `loss.backward()`, not averaged yet
    MEAN = auto()  # averaged over ranks
    DISCARDED = auto()  # on all ranks, because this one asked for it
    LOST = auto()  # discarded because another rank asked for it
    DROPPED = auto()  # another handle's backward made them, so they were cleared


class UserLoop:
    """Watches backward, the root module's forward, and optimizers over its parameters.

    Args:
        model: the root module.
        parts: the parts of its steps.
        watch: notices weights that change between steps.
    """

    def __init__(self, model: nn.Module, parts: StepParts, watch: ReplicaWatch) -> None:
        self._parts, self.watch = parts, watch
        self._buffers, self._reducer = parts.buffers, parts.reducer
        self.comm = parts.comm
        self._models = [model, *model.children()] if type(model) is ModuleList else [model]
        self._state = State.NONE
        self.off = False
        """Whether the handle, rather than the model, turns synchronisation off."""
        self._off_in_forward: bool | None = None
        self._enclosed = False  # in `GradientSync.backward`, not in the user's training loop
        self._task = -1  # the backward seen last; later ones have higher numbers
        self._tasks: set[int] = set()  # backwards of this step
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that used the mean
        self._settings = dict(_THE_CALL)  # their settings when they did
        self._published: list[tuple[weakref.ref[torch.Tensor], int] | None] = []
        self._hashes: Any = None  # of gradients that a rank gets late, taken on arrival
        self.parameter_ids = {id(parameter) for parameter in self._reducer.parameters}
        self.untracked = UntrackedParameters(model, self.parameter_ids)
        self._optimizers = optimizer_watch()
        self._key = next(self._optimizers.numbers)
        self._optimizers.listeners[self._key] = self
        loop: weakref.ref[UserLoop] = weakref.ref(self)  # refers to the model's parameters

        def gradient_is_ready(parameter: torch.Tensor) -> bool:
            if (alive := loop()) is None:
                raise gone()
            return False if alive._enclosed else alive._gradient_came(parameter)

        hook = model.register_forward_pre_hook(ModuleHook(self, UserLoop._forward_begins))
        self.handles = [hook, *self._reducer.watch(gradient_is_ready)]
        """The hooks; none after `close`."""

    # -- sync.backward and sync.step ---------------------------------------------------------------

    @contextmanager
    def enclosed(self, root: torch.Tensor | None = None) -> Generator[None]:
        """Enclose a backward from `root`, or a step, of `GradientSync`; this loop ignores both."""
        tasks: list[int] = []

        def backward_begins(_: torch.Tensor) -> None:
            self._task = current_graph_task()
            self._tasks.add(self._task)
            tasks.append(self._task)
            self._optimizers.backwards.add(self._task)

        hook = None
        if root is not None:
            self.sums_begin()
            hook = root.register_hook(backward_begins) if root.requires_grad else None
        before, self._enclosed = self._enclosed, True
        try:
            yield
        finally:
            self._enclosed = before
            self._optimizers.backwards.difference_update(tasks)
            if hook is not None:
                hook.remove()

    def sums_begin(self) -> None:
        """Note that gradients are made by `sync.backward` from now on."""
        if self._state is not State.SUMS:
            self._state = State.SUMS
            self._tasks = set()

    def sums_end(self, *, discarded: bool) -> None:
        """Note that `sync.step` has used the gradients, or that this rank has `discarded` them."""
        self._state = State.DISCARDED if discarded else State.NONE
        self._hashes = None
        self._users.clear()

    # -- loss.backward() ---------------------------------------------------------------------------

    @property
    def synchronises(self) -> bool:
        """See `GradientSync.require_backward_grad_sync`."""
        return not self.off and all(vars(m).get(_FLAG, True) for m in self._models)

    def pending(self, but: torch.Tensor | None = None) -> bool:
        """Whether the user's training loop has gradients that no optimizer has used, of a parameter
        other than `but`."""
        if self._state in (State.BACKWARD, State.SUMS):
            return self._state is State.BACKWARD
        here = self._state not in (State.NONE, State.DROPPED) and not self._users
        # Where a loop of the user's own is not supported, no hook notices gradients.
        if not here and self._reducer.user_loop:
            return False
        return any(p.grad is not None for p in self._reducer.parameters if p is not but)

    def _forward_begins(self, *_: Any) -> None:
        """Note whether it is under `no_sync`; refuse it in torch's DDP around the model."""
        # The second forward of a checkpointed part runs during a backward.
        if not torch.is_grad_enabled() or current_graph_task() >= 0:
            return
        ddp, own = active_ddp(), getattr(self._reducer, "ddp", None)
        if ddp is not None and ddp is not own:
            first = self._reducer.parameters[0]
            if any(first is parameter for parameter in ddp.module.parameters()):
                raise ConfigError(IN_DDP)
        if self._reducer.user_loop:
            if self._state is State.BACKWARD:
                raise ConfigError(_FAILED)
            self._off_in_forward = not self.synchronises

    def _gradient_came(self, parameter: torch.Tensor) -> bool:
        """Note a gradient from a backward other than this handle's; returns whether that backward
        synchronises.

        Raises:
            ConfigError: `no_sync` was entered or left between forward and backward; or the
                backward comes between a `sync.backward` of this model and the step.
        """
        task = current_graph_task()
        if self._state is State.BACKWARD and task >= self._task:  # the same, or one nested in it
            return self.synchronises
        if task in self._optimizers.backwards:
            dropped = self._state is State.DROPPED
            if self._state is State.SUMS or (not dropped and self.pending(but=parameter)):
                raise ConfigError(_OTHERS)
            parameter.grad = None
            if not dropped or task != self._task:
                self._state, self._task = State.DROPPED, task
                self._buffers.leaf_ends(counts=False)
            return False
        if self._state is State.SUMS:
            raise ConfigError(_PLAIN)
        if not self._reducer.user_loop:
            return False
        before, self._off_in_forward = self._off_in_forward, None
        if before is self.synchronises:
            where = "around the forward only" if before else "after the forward"
            raise ConfigError(f"no_sync() was entered {where}: {_TOO_LATE}")
        if task < self._task:
            raise ConfigError(_REENTRANT)
        self._tasks = {task, *(self._tasks if self._state is State.OWN else ())}
        self._task = task
        self._buffers.leaf_begins(last=self.synchronises)
        self._users.clear()
        self._state = State.BACKWARD
        at_the_end_of_backward(self._backward_ended)
        return self.synchronises

    def _backward_ended(self) -> None:
        self._state = State.OWN
        if self.synchronises:
            self._synchronise()

    # -- optimizer.step() --------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take part in the step, as this rank may have had no backward; gradients are used next."""
        in_backward = current_graph_task() >= 0
        if self._enclosed and not in_backward:
            return
        ours = self._held(optimizer)
        if ours and in_backward:
            raise ConfigError(_STEP_IN_BACKWARD)
        if self._enclosed:
            return
        self.untracked.check(optimizer, own_step=True, backwards=self._tasks)
        if not ours:
            return
        self._refuse_unless_own()
        cleared = all(parameter.grad is None for parameter in ours)
        if self._state is State.DROPPED and cleared:
            raise ConfigError(_OTHERS)
        hashes = None if self._users else self._hashes
        fresh = self._state in (State.DISCARDED, State.LOST)
        fresh = fresh or (self._state is State.MEAN and not cleared)
        if not fresh or optimizer in self._users:
            self._synchronise(late=True)
        elif hashes is not None and hashes != self.watch.gradients():
            raise ConfigError(_TOO_LATE_TO_CHANGE)
        self.watch.changed(optimizer)  # noted now, because its step changes weights too

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has used the gradients."""
        if self._enclosed or not self._held(optimizer):
            return
        self._users.add(optimizer)
        self._note_published()  # because clipping has changed them since
        self.watch.remember(optimizer)
        if self.comm.world_size > 1 and self._state is State.MEAN:
            number = int(self._settings[_STEPS])
            self._settings[_STEPS] = str(number + 1)
            self._settings |= settings_of(optimizer, self._reducer.parameters, number=number)

    def _held(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        groups = (group["params"] for group in optimizer.param_groups)
        return [p for group in groups for p in group if id(p) in self.parameter_ids]

    def finish(self, *, discard: bool = False) -> None:
        """See `GradientSync.finish`, `GradientSync.discard` and [Note: Who synchronises when]."""
        if discard:
            self.refuse_if_foreign()
        else:
            self._refuse_unless_own()
        fresh = self._state is State.LOST
        cleared = all(parameter.grad is None for parameter in self._reducer.parameters)
        fresh = fresh or (self._state is State.MEAN and not cleared)
        if discard or not fresh or self._users:
            self._synchronise(discard=discard)

    def _synchronise(self, *, discard: bool = False, late: bool = False) -> None:
        reducer = self._reducer
        own = self._state in (State.BACKWARD, State.OWN)
        # All forwards of this rank's step count as one leaf here, as the end of a leaf is unknown.
        self._buffers.leaf_ends(counts=own and not discard)
        # Without a backward, these are copies of the last step's gradients; move them away.
        left = [] if own else _left_over(reducer.parameters, self._published)
        for parameter, _, _ in left:
            parameter.grad = None
        settings, self._settings = self._settings, dict(_THE_CALL)
        call = StepCall(loss=None, settings=settings, why=_DRIFTED, discard=discard, late=late)
        try:
            result = take_step(self._parts, call)
        except GradsyncError:  # after a refusal there are no gradients to continue with
            self.sums_end(discarded=True)
            raise
        self._users.clear()
        self._state = State.MEAN
        if result.discarded:
            self._state = State.DISCARDED if discard else State.LOST
            self._settings = settings  # not compared yet
        for parameter, own_grad, copy in () if result.discarded else left:
            # Without a backward on any rank, this is a step with the same gradients.
            mean = parameter.grad if result.had_gradients else copy
            keeps = mean is None or mean is own_grad
            parameter.grad = mean if keeps else own_grad.copy_(mean)
        self._note_published()
        self._hashes = self.watch.gradients() if result.late and not late else None

    def _note_published(self) -> None:
        grads = [p.grad for p in self._reducer.parameters]
        self._published = [None if g is None else (weakref.ref(g), version(g)) for g in grads]

    # -- what is refused ---------------------------------------------------------------------------

    def _refuse_unless_own(self) -> None:
        """Raise unless gradients are, or may be, of a `loss.backward()` that has ended."""
        self.refuse_if_foreign()
        if self._state is State.SUMS:
            raise ConfigError(_OWN_STEP)
        if self._state is State.BACKWARD:
            raise ConfigError(_FAILED)

    def refuse_if_foreign(self) -> None:
        """Raise if the strategy does not support the user's training loop."""
        if not self._reducer.user_loop:
            raise ConfigError(f"strategy={self._reducer.strategy!r} {_FOREIGN}")

    def close(self) -> None:
        """Remove the hooks."""
        self._optimizers.listeners.pop(self._key, None)
        for handle in self.handles:
            handle.remove()
        self.handles = []


def _left_over(
    parameters: Iterable[nn.Parameter],
    published: Iterable[tuple[weakref.ref[torch.Tensor], int] | None],
) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Parameters whose gradient was not written since the last synchronisation, with the gradient
    and a copy of it."""
    found = []
    for parameter, known in zip(parameters, published, strict=False):
        grad = parameter.grad
        if known is None or grad is None or known[0]() is not grad:
            continue
        if known[1] == version(grad):
            found.append((parameter, grad, grad.clone()))
    return found
