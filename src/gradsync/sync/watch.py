"""Watches around a step: for optimizers that step, and for edits of replicas between steps.

Torch offers hooks on all optimizers of the process, in one table. That table must not change while
another thread steps. So one watch enters it once and stays, and listeners register with the watch.

[Note: Signs of an edit] A checkpoint that only rank 0 loads, or `weight.mul_` in one rank's branch,
makes replicas differ. If ranks divide the update, the next step mixes the replicas, and they are
equal again. So an edit must be detected before the update. Each rank looks for cheap signs, and
if one rank finds any, all compare. `check_replicas` finds the edits that these signs miss.

    version counters       any in-place operation of autograd, `load_state_dict`
    addresses              `parameter.data = other`
    samples, on a CPU      `parameter.data.mul_`, a NumPy array over the memory: some bytes of
                           each of `_SAMPLED` parameters, others after every step

The next step's message compares the samples taken after a step over ranks. They show an edit within
an update, by a hook or a clip on one rank.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from ctypes import c_char
from typing import TYPE_CHECKING, Any, Protocol
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
from gradsync.sync.step_metadata import BITS, Settings, StepMetadata, hash_text, refuse_difference

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Listener(Protocol):
    """An object notified of optimizer steps."""

    parameter_ids: set[int]
    """Ids of the parameters that it synchronises."""
    comm: Communicator
    """The ranks that it communicates with."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer uses gradients."""
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer has used gradients."""
        ...


class OptimizerWatch:
    """The hooks. Refers to its listeners weakly, in the order in which they were added: all ranks
    must notify them of a step in the same order."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self.added = 0
        """Number of listeners ever added."""
        self.backwards: set[int] = set()
        """Graph task of each `GradientSync.backward` that is running."""

    def add(self, listener: Listener) -> None:
        """Notify `listener` until it is garbage-collected."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            self.added += 1

    def discard(self, listener: Listener) -> None:
        """Stop notifying `listener`."""
        with self._lock:
            self._listeners = [ref for ref in self._listeners if ref() not in (None, listener)]

    def owns(self, parameter: Tensor) -> bool:
        """Whether a listener synchronises this parameter."""
        return any(id(parameter) in listener.parameter_ids for listener in self.present())

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Notify listeners before a step."""
        for listener in self.present():
            listener.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notify listeners after a step."""
        for listener in self.present():
            listener.after_step(optimizer)

    def present(self) -> list[Listener]:
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


class UntrackedParameters:
    """Finds parameters that an optimizer updates and no handle synchronises: those of a model that
    were replaced or unfrozen after `gs.replicate`, and parameters of no model. (Checking the
    whole model in every step is expensive.) `known` are the ids of synchronised parameters."""

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        self._model = model
        self._known = known
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reached: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Optimizers of other parameters, and the number of the last backward that reached them."""

    def check(
        self, optimizer: Optimizer, *, own_step: bool, backwards: Collection[int] = ()
    ) -> None:
        """Raise ConfigError if `optimizer` is about to update such parameters, in its `own_step`
        (handles of other models may take part) or in this handle's step. Parameters in a separate
        optimizer are refused from its second step on, if one of this model's last `backwards`
        reached them too."""
        seen = optimizer in self._seen
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ours = any(id(p) in self._known for p in parameters)
        if seen and not ours:
            if self._reached.get(optimizer) in backwards:
                raise ConfigError(
                    "a backward of the replicated model also reached parameters outside of it, "
                    f"which this optimizer updates {shapes(optimizer)}: {_ONE_MODULE}"
                )
            return
        untracked = {
            id(p)
            for p in parameters
            if id(p) not in self._known and p.requires_grad and (p.grad is not None or not seen)
        }
        refuse_replaced(self._model, untracked)
        if untracked and own_step:
            untracked -= {i for other in optimizer_watch().present() for i in other.parameter_ids}
        if ours and untracked:
            raise ConfigError(
                "the optimizer also holds parameters outside of the replicated model "
                f"{shapes(optimizer, untracked)}: {_ONE_MODULE}"
            )
        self._seen.add(optimizer)
        if not ours:
            self._watch_backwards(optimizer, [p for p in parameters if id(p) in untracked])

    def _watch_backwards(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        this, its = weakref.ref(self), weakref.ref(optimizer)

        def gradient_came(_: Tensor) -> None:
            alive, optimizer = this(), its()
            if alive is not None and optimizer is not None:
                alive._reached[optimizer] = current_graph_task()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(gradient_came)


_ONE_MODULE = (
    "their gradients are not averaged, so ranks would update them differently. Replicate one "
    "module that holds all of them, as in gs.replicate(torch.nn.ModuleList([a, b]), world)"
)


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


def refuse_closure(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that evaluates the loss itself, such as LBFGS."""
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
        raise ConfigError(
            f"sync.step() cannot run {type(optimizer).__name__}, whose step evaluates the loss "
            "again and again, by a closure; in a loop of your own call optimizer.step(closure), "
            "with loss.backward() in the closure, which must return the same loss on all ranks"
        )


_SAMPLED = 64
"""Number of parameters sampled after a step, and before the next; about 3 us each."""
_BYTES = 16
"""Bytes sampled at the start of a parameter; as many at a place that changes with each step."""


class ReplicaWatch:
    """This rank's replica after the last step, see [Note: Signs of an edit]; includes frozen
    parameters. If ranks hold different weights on purpose (not `equal`), nothing is watched."""

    def __init__(self, model: nn.Module, comm: Communicator, *, equal: bool) -> None:
        self._comm = comm
        watched = equal and comm.world_size > 1
        self._named = list(model.named_parameters()) if watched else []
        self._weights = [parameter for _, parameter in self._named if _is_plain(parameter)]
        self._watched = {id(weight) for weight in self._weights}
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
        self._signs |= self._signs_now(w for w in weights if id(w) in self._watched)

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

    def refuse_unlike(self, agreed: StepMetadata, settings: Settings, why: str) -> None:
        """Raise on all ranks if they differ in `settings` (ConfigError, see `refuse_difference`) or
        in weights (RunError), which are compared completely if they have changed on some rank.
        Does nothing in a step that is discarded."""
        if agreed.discard:
            return
        if not agreed.alike:
            refuse_difference(self._comm, settings, why)
        if agreed.changed:
            # Whole group, int64 [1], then the cost of `check_replicas`.
            told = all_gather_numbers(self._comm, int(self._edited))
            self._edited = True
            edited = [rank for rank, number in enumerate(told) if number]
            check_replicas(self._named, self._comm, edited=edited)
            self._edited, self._turn = False, 0  # from here on all ranks sample the same elements

    @property
    def sample(self) -> int:
        """A number of 20 bits computed from the samples taken by `remember`."""
        samples = b"".join(self._signs[id(weight)][2] for weight in self._weights)
        return int(hash_text(samples), 16) % 2**BITS

    def gradients(self) -> list[list[int]]:
        """Hashes of this rank's gradients; waits for the device."""
        grads = [weight.grad for weight in self._weights]
        return [[] if grad is None else hash_bits(grad).tolist() for grad in grads]

    def _signs_now(self, weights: Iterable[Tensor]) -> dict[int, tuple[int, int, bytes]]:
        """Versions and addresses of `weights` by their ids, and the bits of a few elements of some.

        Samples other elements in every step, so that each element has its turn."""
        sampled, signs = self._sampled, {}
        for weight in weights:
            key = id(weight)
            bits = _few(weight, self._turn) if key in sampled and _readable(weight) else b""
            signs[key] = version(weight), weight.data_ptr(), bits
        return signs


def _is_plain(weight: Tensor) -> bool:
    """Whether the tensor has readable memory, and counts its versions."""
    is_dense = type(weight) is torch.nn.Parameter and weight.layout == torch.strided
    return is_dense and not weight.is_inference()


_Sample = c_char * _BYTES
_STRIDE = 40_503
"""Bytes between the places of two steps; odd, so that all places have their turn."""
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def _readable(weight: Tensor) -> bool:
    """Whether it can be read without waiting for a device."""
    return (
        weight.is_cpu and weight.dtype in _FLOATS and weight.is_contiguous() and weight.numel() > 0
    )


def _few(weight: Tensor, turn: int) -> bytes:
    """Bytes at its start and at a place that depends on `turn`. Reads by address, because a torch
    view takes five times as long, and a NumPy array would prevent resizing the memory."""
    begin, size = weight.data_ptr(), weight.numel() * weight.element_size()
    if size <= 2 * _BYTES:
        return (c_char * size).from_address(begin).raw
    place = begin + _BYTES + turn * _STRIDE % (size - 2 * _BYTES + 1)
    return _Sample.from_address(begin).raw + _Sample.from_address(place).raw


class ModuleHook:
    """Calls `function`; copied or pickled, it becomes a hook that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return (NoHook, ())


run_uncompiled(ModuleHook.__call__)


class NoHook:
    """Stand-in for a `ModuleHook` in a copy."""

    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""
