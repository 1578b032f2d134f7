"""What a process does with its optimizers and parameters, beside training the replicated model.

Torch offers hooks on all optimizers of the process, in one table. That table must not change while
another thread steps. So one watch enters it once and stays, and listeners register with the watch.

[Note: Signs of an edit] A checkpoint that only rank 0 loads, or `weight.mul_` in one rank's branch,
makes replicas differ. If ranks divide the update, the next step mixes the replicas, and they are
equal again. So an edit must be detected before the update. Each rank looks for cheap signs, and
if one rank finds any, all compare. `check_replicas` finds the edits that these signs miss.

    version counters       any in-place operation of autograd, `load_state_dict`
    addresses              `parameter.data = other`
    samples, on a CPU      `parameter.data.mul_`, a NumPy array over the memory: some elements of
                           each of `_SAMPLED` parameters, others after every step

The next step's message compares the samples taken after a step over ranks. They show an edit within
an update, by a hook or a clip on one rank.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import (
    current_graph_task,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    run_uncompiled,
    step_hooks,
    version,
)
from gradsync.errors import ConfigError
from gradsync.sync.check_replicas import check_replicas, hash_bits
from gradsync.sync.step_metadata import mark_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class OptimizerWatch:
    """The hooks. Refers to its listeners (each model's `UserLoop`) weakly, in the order in which
    they were added: all ranks must notify them of a step in the same order."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self.added = 0
        """Number of listeners ever added."""
        self.backwards: set[int] = set()
        """Graph task of each `GradientSync.backward` that is running."""

    def add(self, listener: Any) -> None:
        """Notify `listener` until it is garbage-collected."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            self.added += 1

    def discard(self, listener: Any) -> None:
        """Stop notifying `listener`."""
        with self._lock:
            self._listeners = [ref for ref in self._listeners if ref() not in (None, listener)]

    def owner_of(self, parameter: Tensor) -> Any:
        """The listener that synchronises this parameter, or None."""
        present = self.present()
        return next((each for each in present if id(parameter) in each.parameter_ids), None)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Notify listeners before a step."""
        for listener in self.present():
            listener.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notify listeners after a step."""
        for listener in self.present():
            listener.after_step(optimizer)

    def present(self) -> list[Any]:
        """Listeners that are alive, in order."""
        with self._lock:
            found = [(ref, ref()) for ref in self._listeners]
            self._listeners = [ref for ref, listener in found if listener is not None]
        return [listener for _, listener in found if listener is not None]


def optimizer_watch() -> OptimizerWatch:
    """The process's watch. The first call adds it to torch's table, and it stays there."""
    for hook in optimizer_pre_hooks.values():
        if isinstance(hook, OptimizerWatch):
            return hook
    watch = OptimizerWatch()
    register_optimizer_step_pre_hook(watch)
    register_optimizer_step_post_hook(watch.after_step)
    return watch


@contextmanager
def postponed(parameters: Sequence[Tensor]) -> Generator[None]:
    """Enclose an update of some of a model's `parameters` that `GradientSync.step` has postponed:
    it is no step of the user's, and no edit."""
    owner = optimizer_watch().owner_of(parameters[0])
    with nullcontext() if owner is None else owner.enclosed():
        yield
    if owner is not None:
        owner.watch.remember_late(parameters)


def why_not_now(optimizer: Optimizer, *, after: bool = True) -> str:
    """Why the next step must be whole, though not every step must; see `elementwise.why_whole`.
    Hooks called `after` a step count if they would find no gradients."""
    own = step_hooks(optimizer)
    if own[0] or (after and own[1]):
        return "hooks on the optimizer may look at the whole gradient"
    everywhere = [*optimizer_pre_hooks.values(), *(optimizer_post_hooks.values() if after else ())]
    if not all(isinstance(getattr(h, "__self__", h), OptimizerWatch) for h in everywhere):
        return "hooks on all optimizers may look at the whole gradient"
    step = optimizer.__dict__.get("step")  # a scheduler wraps it, to count steps
    if step is not None and inspect.unwrap(step) != inspect.unwrap(type(optimizer).step):
        return "optimizer.step was replaced"
    return ""


_ONE_MODULE = (
    "their gradients are not averaged, so ranks would update them differently. Replicate one "
    "module that holds all of them, as in gs.replicate(torch.nn.ModuleList([a, b]), world)"
)


class UntrackedParameters:
    """Finds parameters that an optimizer updates and no handle synchronises: those of a model that
    were replaced or unfrozen after `gs.replicate`, and parameters of no model. (Checking the
    whole model in every step is expensive.) `known` are the ids of synchronised parameters."""

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        self._model, self._known = model, known
        self._reached: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Optimizers of other parameters, and the number of the last backward that reached them."""

    def check(
        self, optimizer: Optimizer, *, own_step: bool, backwards: Collection[int] = ()
    ) -> None:
        """Raise ConfigError if `optimizer` is about to update such parameters, in its `own_step`
        (handles of other models may take part) or in this handle's step. Parameters in a separate
        optimizer are refused from its second step on, if one of this model's last `backwards`
        reached them too."""
        if optimizer in self._reached:
            if self._reached[optimizer] in backwards:
                raise ConfigError(
                    "a backward of the replicated model also reached parameters outside of it, "
                    f"which this optimizer updates {shapes(optimizer)}: {_ONE_MODULE}"
                )
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        outside = {id(p): p for p in held if id(p) not in self._known and p.requires_grad}
        if not outside:
            return
        refuse_replaced(self._model, outside)
        if own_step:
            owner_of = optimizer_watch().owner_of
            outside = {i: p for i, p in outside.items() if owner_of(p) is None}
        if not any(id(p) in self._known for p in held):
            self._watch(optimizer, outside.values())
        elif outside:
            raise ConfigError(
                "the optimizer also holds parameters outside of the replicated model "
                f"{shapes(optimizer, outside)}: {_ONE_MODULE}"
            )

    def _watch(self, optimizer: Optimizer, parameters: Collection[Tensor]) -> None:
        self._reached[optimizer] = -1
        this, its = weakref.ref(self), weakref.ref(optimizer)

        def gradient_came(_: Tensor) -> None:
            alive, optimizer = this(), its()
            if alive is not None and optimizer is not None:
                alive._reached[optimizer] = current_graph_task()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(gradient_came)


def refuse_replaced(model: nn.Module, untracked: Collection[int]) -> None:
    """Raise ConfigError if `model` holds a parameter with one of these ids."""
    for name, parameter in model.named_parameters() if untracked else ():
        if id(parameter) in untracked:
            raise ConfigError(
                f"parameter {name!r} was replaced or became trainable after gs.replicate "
                "(load_state_dict(assign=True) replaces all): it is not synchronised. Call close() "
                "on the handle, replicate the model again, and make a new optimizer"
            )


def shapes(optimizer: Optimizer, ids: Collection[int] | None = None) -> str:
    """Groups and shapes of the parameters with these ids, or of all parameters, for messages."""
    said = []
    for index, group in enumerate(optimizer.param_groups):
        found = [str([*p.shape]) for p in group["params"] if ids is None or id(p) in ids]
        said += [f"group {index}: {', '.join(found)}"] if found else []
    return f"({'; '.join(said)})"


class ModuleHook:
    """Calls `function(owner, *arguments)` while `owner`, which it does not keep alive, exists.
    Copied or pickled, it becomes a hook that does nothing."""

    def __init__(self, owner: Any = None, function: Callable[..., Any] | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        if owner is not None and self._function is not None:
            return self._function(owner, *arguments)
        return None

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return (ModuleHook, ())


run_uncompiled(ModuleHook.__call__)


_SAMPLED = 16
"""Number of parameters sampled after a step, and before the next; about 5 us each."""
_ELEMENTS = 8
"""Number of elements sampled of a parameter."""
_STRIDE = 10_007
"""Elements between the places of two steps; prime, so that all places have their turn."""


class ReplicaWatch:
    """This rank's replica after the last step, see [Note: Signs of an edit]; includes frozen
    parameters. If ranks hold different weights on purpose (not `equal`), nothing is watched."""

    def __init__(self, model: nn.Module, comm: Communicator, *, equal: bool) -> None:
        self._comm = comm
        watched = equal and comm.world_size > 1
        self._named = list(model.named_parameters()) if watched else []
        # Those with readable memory that count their versions.
        self._weights = [
            weight
            for _, weight in self._named
            if type(weight) is torch.nn.Parameter
            and weight.layout == torch.strided
            and not weight.is_inference()
        ]
        self._states: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._turn = 0
        self._sampled = frozenset[int]()  # ids
        self._edited = False
        self.remember()

    def remember(self, *optimizers: Optimizer) -> None:
        """Accept the current weights, and the state of `optimizers`, on this rank.
        `remember_late` does the same for weights that are updated later."""
        self._turn += 1
        count = len(self._weights)
        first = self._turn * _SAMPLED % count if count > _SAMPLED else 0
        self._sampled = frozenset(map(id, self._weights[first : first + _SAMPLED]))
        self._signs = self._signs_now(self._weights)
        self.accept_states(*optimizers)

    def remember_late(self, weights: Iterable[Tensor]) -> None:
        """Accept weights that were updated after `remember`."""
        self._signs |= self._signs_now(w for w in weights if id(w) in self._signs)

    def accept_states(self, *optimizers: Optimizer) -> None:
        """Take the state of `optimizers` as accepted, because ranks have just compared it."""
        for optimizer in optimizers:
            self._states[optimizer] = optimizer.state

    def state_of(self, optimizer: Optimizer) -> str:
        """Origin of its state, the same on ranks that load the same state."""
        if optimizer not in self._states:
            # Merely reading `state[parameter]` makes an empty entry.
            loaded = any(optimizer.state.values())
            return "loaded before the first step" if loaded else "empty"
        kept = self._states[optimizer] is optimizer.state
        return "kept from the last step" if kept else "loaded since the last step"

    def changed(self, *optimizers: Optimizer) -> bool:
        """Whether weights have changed, or one of these states was loaded, since `remember`; also
        if an earlier change was never compared."""
        if not self._edited:
            loaded = any(self.state_of(optimizer).startswith("loaded") for optimizer in optimizers)
            self._edited = loaded or self._signs != self._signs_now(self._weights)
        return self._edited

    def refuse_unlike(self, *, changed: bool) -> None:
        """If weights have `changed` on some rank, compare them completely, and raise RunError on
        all ranks if they differ. Whole group, int64 [1], then the cost of `check_replicas`."""
        if changed:
            told = all_gather_numbers(self._comm, int(self._edited))
            self._edited = True
            edited = [rank for rank, number in enumerate(told) if number]
            check_replicas(self._named, self._comm, edited=edited)
            self._edited, self._turn = False, 0  # from here on all ranks sample the same elements

    @property
    def sample(self) -> int:
        """A number computed from the samples taken by `remember`."""
        return mark_of("".join(few for _, _, few in self._signs.values()).encode())

    def gradients(self) -> list[list[int]]:
        """Hashes of this rank's gradients; waits for the device."""
        grads = [weight.grad for weight in self._weights]
        return [[] if grad is None else hash_bits(grad).tolist() for grad in grads]

    def _signs_now(self, weights: Iterable[Tensor]) -> dict[int, tuple[int, int, str]]:
        """Versions and addresses of `weights` by their ids, and a few elements of some."""
        sampled, signs = self._sampled, {}
        for weight in weights:
            key, few = id(weight), ""
            if key in sampled and weight.is_cpu and weight.is_contiguous():  # no wait for a device
                start = self._turn * _STRIDE % max(weight.numel() - _ELEMENTS, 1)
                # Not by a slice: it would cost six operations of torch, in every step.
                place = weight.data_ptr() + start * weight.itemsize
                count = min(_ELEMENTS, weight.numel())
                few = ctypes.string_at(place, count * weight.itemsize).hex()
            signs[key] = version(weight), weight.data_ptr(), few
        return signs
