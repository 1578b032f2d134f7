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

A missing backward shows in gradients that an optimizer has already used, or that were cleared.
Enter `no_sync` before the forward: torch's DDP and FSDP decide there, and a program that enters it
later drifts silently. The order is checked here too, so a loop works under every strategy.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import ModuleList

from gradsync.comm.values import same_on_all_ranks
from gradsync.core.torch_private import (
    active_ddp,
    at_the_end_of_backward,
    current_graph_task,
    version,
)
from gradsync.errors import ConfigError, GradsyncError
from gradsync.sync.check_model import ADVICE
from gradsync.sync.engine import gone
from gradsync.sync.reducer import Reducer
from gradsync.sync.step import StepCall, StepParts, take_step
from gradsync.sync.step_metadata import STEPS, settings_of
from gradsync.sync.watch import ModuleHook, ReplicaWatch, UntrackedParameters, optimizer_watch

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("gradsync")

# Reasons for refusing a loop that mixes both ways of working.
_TOGETHER = (
    "; step before it, or replicate models that one backward trains together: "
    "gs.replicate(torch.nn.ModuleList([a, b]))"
)
_PLAIN_IN_MICRO_STEP = (
    "loss.backward() in sync.micro_step(), where every micro-batch would be averaged as a step: "
    "write sync.backward(loss, micro_batch) there and sync.step(optimizer) after the last one; or, "
    "in a loop of your own, sync.no_sync() in place of micro_step around all but the last"
)
_PLAIN_BEFORE_STEP = (
    "a backward that is not sync.backward() reached this model between sync.backward() and "
    "sync.step(): its gradients would be added to the step's"
)
_OTHERS_BEFORE_STEP = (
    "another handle's sync.backward() reached this model between its own backward and its step: "
    f"its gradients would be added to that step's{_TOGETHER}"
)
_OTHERS_GRADIENTS = (
    "this optimizer's gradients came by another handle's sync.backward(), which keeps only its own "
    f"model's{_TOGETHER}"
)
_TOO_LATE = (
    "enclose forward and backward of a micro-batch together (or set require_backward_grad_sync "
    "before the forward), as torch's DDP needs it (there, replicas would drift apart silently)"
)
_REENTRANT = (
    "activation checkpointing with use_reentrant=True runs a backward inside of the backward, and "
    "its end cannot be told from the whole one's; use use_reentrant=False"
)
_OWN_STEP = (
    "sync.backward() is followed by sync.step(optimizer), not by optimizer.step(): nobody has "
    "divided these gradients yet"
)
_FINISH = (
    "sync.backward() is followed by sync.step(optimizer), not by sync.finish(), which belongs to "
    "loss.backward()"
)
_FAILED = (
    "the last backward ended with an error, and other ranks may be waiting for its gradients: call "
    "sync.discard() first (then no rank uses this step's)"
)
_ADDED = (
    "this backward's gradients are added to those of the one before, and both are averaged over "
    "ranks: enclose all but a step's last in sync.no_sync(), which sends once; of micro-batches, "
    "divide each loss by their number, or the step grows with it: with those of gs.loader that "
    "differs from one number of ranks to another (sync.backward(loss, micro_batch) and "
    "sync.step(optimizer) divide by themselves) (said once)"
)
_TOO_LATE_TO_CHANGE = (
    "gradients were changed between loss.backward() and optimizer.step() (clipped?), but a rank "
    "without a backward in this step gets them in optimizer.step() only, so that weights would "
    "drift apart: call sync.finish() before it, on all ranks (after a backward it does nothing)"
)
_STEP_IN_BACKWARD = (
    "optimizer.step() was called during a backward, by a hook on a parameter: this rank's "
    "gradients are not averaged yet. Step after the backward; with an optimizer for each layer, by "
    "sync.step([a, b, ...])"
)
_UNLIKE = (
    "optimizer.step() came without a backward on any rank, and the gradients left in .grad differ "
    "between ranks (written through .data?): write to .grad itself, which counts as this rank's "
    "gradient, or average it with gs.all_reduce"
)
_FOREIGN = (
    "works through sync.backward and sync.step only (an optimizer's own step would let ranks drift "
    "apart); in a loop of your own use strategy='invariant', 'bucketed', 'naive' or 'fsdp'"
)

_FLAG = "require_backward_grad_sync"  # torch's DDP has the same name; set on the model
_THE_CALL = {"the call": "loss.backward() or optimizer.step()", STEPS: "0"}
_DRIFTED = (
    "so their last steps differed, and their weights do: go back to a checkpoint from before, and "
    "step with the same on all ranks (a scheduler that looks at a loss: with its mean over ranks)"
)


class UserLoop:
    """Watches backward, the root module's forward, and optimizers over its parameters.

    Args:
        model: the root module.
        parts: the parts of its steps.
        watch: notices weights that change between steps.
    """

    def __init__(self, model: nn.Module, parts: StepParts, watch: ReplicaWatch) -> None:
        self._parts, self._watch = parts, watch
        self._buffers, self._reducer = parts.buffers, parts.reducer
        self.comm = parts.comm
        self.leaves = 0
        """Number of `GradientSync.backward`s since the last step."""
        self.in_micro_step = False
        """Whether in `GradientSync.micro_step`, which encloses `GradientSync.backward`."""
        self._models = [model, *model.children()] if type(model) is ModuleList else [model]
        self.closed = self.off = False
        """Whether the handle, rather than the model, turns synchronisation off."""
        self._no_sync_in_forward: bool | None = None
        self._enclosed = False  # in `GradientSync.backward`, not in the user's training loop
        self._in_backward = False
        self._task = -1  # the backward seen last; later ones have higher numbers
        self._tasks: set[int] = set()  # backwards of this step
        self._dirty = False  # there are gradients that have not been synchronised
        self.finished = False
        """Whether gradients of a `loss.backward()` were synchronised."""
        self._others = -1  # the last backward of another handle since this model's own
        self._discarded = False  # and they were discarded
        self._discarded_elsewhere = False  # because another rank wanted it
        self._warned = parts.comm.rank > 0
        self._published: list[tuple[weakref.ref[torch.Tensor], int] | None] = []
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that used these
        self._settings = dict(_THE_CALL)  # their settings when they did
        self._hashes: Any = None  # of gradients that a rank gets late, taken on arrival
        self.parameter_ids = {id(parameter) for parameter in self._reducer.parameters}
        self.untracked = UntrackedParameters(model, self.parameter_ids)
        self._optimizers = optimizer_watch()
        self._optimizers.add(self)
        self._handles: list[Any] = _hooks(self, model, self._reducer)
        loop = weakref.ref(self)  # because it refers to the shards
        self._reducer.shards.updates = lambda parameters: (
            nullcontext() if (known := loop()) is None else known.late_update(parameters)
        )

    @contextmanager
    def enclosed(self, root: torch.Tensor | None = None) -> Generator[None]:
        """Enclose a backward from `root`, or a step, of `GradientSync`; this loop ignores both."""
        tasks: list[int] = []

        def backward_begins(_: torch.Tensor) -> None:
            self._task = current_graph_task()
            self._tasks = {self._task, *(self._tasks if self.leaves > 1 else ())}
            tasks.append(self._task)
            self._optimizers.backwards.add(self._task)

        hook = None
        if root is not None and root.requires_grad:
            hook = root.register_hook(backward_begins)
            self._others = -1
        before, self._enclosed = self._enclosed, True
        try:
            yield
        finally:
            self._enclosed = before
            self._optimizers.backwards.difference_update(tasks)
            if hook is not None:
                hook.remove()

    @contextmanager
    def late_update(self, parameters: Iterable[torch.Tensor]) -> Generator[None]:
        """Enclose an update of `parameters` that `GradientSync.step` has postponed."""
        with self.enclosed():
            yield
        self._watch.remember_late(parameters)

    @property
    def synchronises(self) -> bool:
        """See `UserLoopMethods.require_backward_grad_sync`."""
        return not self.off and all(vars(m).get(_FLAG, True) for m in self._models)

    @synchronises.setter
    def synchronises(self, wanted: bool) -> None:
        """Set it between two micro-batches."""
        self._refuse_if_foreign()
        self.off = not wanted

    def gradient_came(self, parameter: torch.Tensor) -> bool:
        """Note a gradient from a backward other than `GradientSync.backward`; returns whether that
        backward synchronises.

        Raises:
            ConfigError: `no_sync` was entered or left between forward and backward; or the
                backward comes between a `GradientSync.backward` of this model and the step.
        """
        task = current_graph_task()
        if self._in_backward and task >= self._task:  # the same backward, or one nested in it
            return self.synchronises
        if task in self._optimizers.backwards:
            self._drop(parameter, task)
            return False
        if self.in_micro_step and self._reducer.user_loop:
            raise ConfigError(_PLAIN_IN_MICRO_STEP)
        if self.leaves:
            raise ConfigError(_PLAIN_BEFORE_STEP)
        if not self._reducer.user_loop:
            return False
        self._backward_begins(task, parameter)
        return self.synchronises

    def _drop(self, parameter: torch.Tensor, task: int) -> None:
        """Discard a gradient from another handle's backward."""
        known = (p for p in self._reducer.parameters if p is not parameter)
        if self.leaves or (self._others < 0 and self._waiting(known)):
            raise ConfigError(_OTHERS_BEFORE_STEP)
        parameter.grad = None
        if task != self._others:
            self._others = task
            self._buffers.leaf_ends(counts=False)

    def _backward_begins(self, task: int, first: torch.Tensor) -> None:
        before, self._no_sync_in_forward = self._no_sync_in_forward, None
        if before is self.synchronises:
            where = "around the forward only" if before else "after the forward"
            raise ConfigError(f"no_sync() was entered {where}: {_TOO_LATE}")
        if task < self._task:
            raise ConfigError(_REENTRANT)
        unused = self.finished and self.synchronises and not (self._discarded or self._stepped)
        others = (parameter for parameter in self._reducer.parameters if parameter is not first)
        if unused and not self._warned and _any_gradient(others):
            self._warned = True
            log.warning(_ADDED)
        self._task = task
        self._tasks = {task, *(self._tasks if self._dirty else ())}
        self._buffers.leaf_begins(last=self.synchronises)
        self._dirty = self._in_backward = True
        self._others = -1
        at_the_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._in_backward = False
        if self.synchronises:
            self.finish()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take part in the step, as this rank may have had no backward; gradients are used next."""
        if current_graph_task() >= 0 and self._is_ours(optimizer):
            raise ConfigError(_STEP_IN_BACKWARD)
        if self._enclosed:
            return
        self.untracked.check(optimizer, own_step=True, backwards=self._tasks)
        if not self._is_ours(optimizer):
            return
        self._refuse_if_foreign()
        if self.leaves:
            raise ConfigError(_OWN_STEP)
        self.refuse_if_failed()
        if self._others >= 0 and not _any_gradient(_held(optimizer, self.parameter_ids)):
            raise ConfigError(_OTHERS_GRADIENTS)
        cleared = not self._discarded and not _any_gradient(_held(optimizer, self.parameter_ids))
        used = optimizer in self._stepped or cleared
        hashes = None if self._stepped else self._hashes
        if self._dirty or not self.finished or used:
            self._synchronise(late=True)
        elif hashes is not None and hashes != self._watch.gradients():
            raise ConfigError(_TOO_LATE_TO_CHANGE)
        self._watch.changed(optimizer)  # noted now, because its step changes weights too

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has used the gradients."""
        if self._enclosed or not self._is_ours(optimizer):
            return
        self._stepped.add(optimizer)
        self._note_published()  # because clipping has changed them since
        self._watch.remember(optimizer)
        if self.comm.world_size > 1 and not self._discarded:
            number = int(self._settings[STEPS])
            self._settings[STEPS] = str(number + 1)
            self._settings |= settings_of(optimizer, self._reducer.parameters, number=number)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return next(_held(optimizer, self.parameter_ids), None) is not None

    def finish(self) -> None:
        """See `UserLoopMethods.finish` and [Note: Who synchronises when]."""
        self._refuse_if_foreign()
        self.refuse_if_failed()
        if self.leaves:
            raise ConfigError(_FINISH)
        fresh = self.finished and not self._stepped
        fresh &= self._discarded_elsewhere or _any_gradient(self._reducer.parameters)
        if self._dirty or not fresh:
            self._synchronise()

    def discard(self) -> None:
        """See `GradientSync.discard`."""
        self._refuse_if_foreign()
        self._in_backward = False
        self._synchronise(discard=True)

    @property
    def pending(self) -> bool:
        """Whether the user's training loop has gradients that no optimizer has used."""
        return self._waiting(self._reducer.parameters)

    def _waiting(self, parameters: Iterable[torch.Tensor]) -> bool:
        waiting = self._dirty or (self.finished and not self._stepped)
        waiting = waiting or not self._reducer.user_loop  # no hook would notice them
        return self._in_backward or (waiting and _any_gradient(parameters))

    def _synchronise(self, *, discard: bool = False, late: bool = False) -> None:
        reducer = self._reducer
        # All forwards of this rank's step count as one leaf here, as the end of a leaf is unknown.
        self._buffers.leaf_ends(counts=self._dirty and not discard)
        # Without a backward, these are copies of the last step's gradients; move them away.
        left = [] if self._dirty else _left_over(reducer, self._published)
        for parameter, _, _ in left:
            parameter.grad = None
        settings, self._settings = self._settings, dict(_THE_CALL)
        call = StepCall(loss=None, settings=settings, why=_DRIFTED, discard=discard, late=late)
        try:
            result = take_step(self._parts, call)
        except GradsyncError:  # after a refusal there are no gradients to continue with
            self.step_ends(discarded=True)
            raise
        self.step_ends(discarded=result.discarded)
        self._discarded_elsewhere = result.discarded and not discard
        if result.discarded:
            self._settings = settings  # not compared yet
        for parameter, own, copy in () if result.discarded else left:
            # Without a backward on any rank, this is a step with the same gradients.
            mean = parameter.grad if result.had_gradients else copy
            parameter.grad = mean if mean is None or mean is own else own.copy_(mean)
        if not (result.discarded or result.had_gradients):
            self._refuse_unlike_gradients()
        self._note_published()
        self._hashes = self._watch.gradients() if result.late and not late else None

    def _refuse_unlike_gradients(self) -> None:
        """Compare restored gradients by hashes, since writes through `.data` bump no version."""
        if not same_on_all_ranks(self.comm, repr(self._watch.gradients()).encode()):
            raise ConfigError(_UNLIKE)

    def _note_published(self) -> None:
        grads = [p.grad for p in self._reducer.parameters]
        self._published = [None if g is None else (weakref.ref(g), version(g)) for g in grads]

    def step_ends(self, *, discarded: bool) -> None:
        """Note that this step's gradients are synchronised, or `discarded`."""
        self._dirty, self.finished, self._discarded = False, True, discarded
        self._discarded_elsewhere, self._hashes = False, None
        self._stepped.clear()

    def refuse_if_failed(self) -> None:
        """Raise if the last backward did not finish."""
        if self._in_backward:
            raise ConfigError(_FAILED)

    def _refuse_if_foreign(self) -> None:
        if not self._reducer.user_loop:
            raise ConfigError(f"strategy={self._reducer.strategy!r} {_FOREIGN}")

    def close(self) -> None:
        """Remove the hooks."""
        self.closed = True
        self._optimizers.discard(self)
        for handle in self._handles:
            handle.remove()


@contextmanager
def _no_sync(user_loop: UserLoop) -> Generator[None]:
    before = user_loop.off
    user_loop.synchronises = False
    try:
        yield
    finally:
        user_loop.off = before


def _hooks(user_loop: UserLoop, model: nn.Module, reducer: Reducer) -> list[Any]:
    """Hooks that do not refer to `user_loop`, which refers to the model's parameters."""
    loop: weakref.ref[UserLoop] = weakref.ref(user_loop)

    def before_forward(*_: Any) -> None:
        alive = loop()
        # The second forward of a checkpointed part runs during a backward.
        if alive is None or not torch.is_grad_enabled() or current_graph_task() >= 0:
            return
        alive.refuse_if_failed()
        alive._no_sync_in_forward = not alive.synchronises

    def gradient_is_ready(parameter: torch.Tensor) -> bool:
        alive = _alive(loop)
        return False if alive._enclosed else alive.gradient_came(parameter)

    handles: list[Any] = []
    if reducer.user_loop:
        handles.append(model.register_forward_pre_hook(ModuleHook(before_forward)))
    return handles + reducer.watch(gradient_is_ready)


def refuse_ddp_around(model: nn.Module, reducer: Reducer) -> Any:
    """Watch for forwards of `model` through torch's DDP, regardless of when DDP was wrapped around
    it; returns the hook's handle, for removal."""
    parameter, own = reducer.parameters[0], getattr(reducer, "ddp", None)

    def before_forward(*_: Any) -> None:
        ddp = active_ddp()
        if ddp is None or ddp is own or not torch.is_grad_enabled():
            return
        if any(parameter is its for its in ddp.module.parameters()):
            raise ConfigError(ADVICE["DistributedDataParallel"])

    return model.register_forward_pre_hook(ModuleHook(before_forward))


def _left_over(
    reducer: Reducer, published: Iterable[tuple[weakref.ref[torch.Tensor], int] | None]
) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Parameters whose gradient was not written since the last synchronisation, with the gradient
    and a copy of it."""
    found = []
    for parameter, known in zip(reducer.parameters, published, strict=False):
        grad = parameter.grad
        if known is None or grad is None or known[0]() is not grad:
            continue
        if known[1] == version(grad):
            found.append((parameter, grad, grad.clone()))
    return found


class UserLoopMethods:
    """Methods of `GradientSync` for the user's training loop."""

    _user_loop: UserLoop

    def finish(self) -> None:
        """Set every `.grad` to the mean over ranks, as torch's DDP does; for user training loops.

        Backward does this itself when it ends. Call `finish` on a rank that had no backward in this
        step, and under strategies without hooks. A second call does nothing.
        """
        self._refuse_if_closed()
        self._user_loop.finish()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages over ranks, in the user's training loop, as in torch's DDP.

        False means `no_sync` without the `with`: set it before the forward, and set True before the
        forward of the last micro-batch. It can also be set on the model itself
        (`model.require_backward_grad_sync = False`). Regardless of it, `sync.backward` only adds
        up, and `sync.step` synchronises.

        Raises:
            ConfigError: on setting, if the strategy does not support the user's training loop.
        """
        return self._user_loop.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """Set it between two micro-batches."""
        self._refuse_if_closed()
        self._user_loop.synchronises = wanted

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate, in the user's training loop. Enclose forward and backward of all
        micro-batches except the last."""
        self._refuse_if_closed()
        return _no_sync(self._user_loop)

    def _refuse_if_closed(self) -> None:
        if self._user_loop.closed:
            raise ConfigError("this handle is closed: call gs.replicate again")


def _alive(loop: weakref.ref[UserLoop]) -> UserLoop:
    found = loop()
    if found is None:
        raise gone()
    return found


def _held(optimizer: torch.optim.Optimizer, ids: set[int]) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if id(p) in ids)


def _any_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)
