"""The user's optimizers: notification of their steps, and what is checked before an update.

Torch offers hooks on all optimizers of the process, in one table. That table must not change while
another thread steps, so one watch enters it once and stays; listeners come and go here.

A rank that steps with another learning rate (`ReduceLROnPlateau` on its own loss, a checkpoint that
only rank 0 loaded) trains another model; where ranks divide the update among themselves, all of
them get one mixture of both, which no comparison of replicas can detect afterwards. So settings are
compared before any update, by a digest in the step's message.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
import weakref
from array import array
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.core.torch_private import optimizer_pre_hooks
from gradsync.errors import ConfigError
from gradsync.sync.check_model import group_ranks, name_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Settings = dict[str, str]
"""Text by name, in the order in which messages look for the first difference."""

STEPS = "number of optimizer.step() since the last synchronisation"
"""Name of a setting, in the user's training loop."""
_UNEVEN = (
    "each loss.backward() outside of sync.no_sync() is a synchronisation, of which all ranks need "
    "as many before a step: enclose all micro-batches of a step but the last in sync.no_sync(), "
    "skip no step on one rank alone, and go back to a checkpoint from before: weights differ now"
)

_BITS = 20
"""Size of a digest's numbers: W n^2 is exact in float64 for up to 2^13 ranks."""


NOT_OPTIONS = frozenset({"params", "param_names"})
"""Entries of a parameter group that are not hyper-parameters."""


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


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
    """The hooks; refers to its listeners weakly, in the order in which they were added: on all
    ranks they must take part in a step in one order."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self.added = 0
        """Number of listeners ever added."""
        self.backwards: set[int] = set()
        """Graph tasks of each `GradientSync.backward` that runs now."""

    def add(self, listener: Listener) -> None:
        """Notify `listener` as long as it lives."""
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
    """The process's watch; the first call enters it into torch's table, where it stays."""
    for hook in optimizer_pre_hooks():
        if isinstance(hook, OptimizerWatch):
            return hook
    watch = OptimizerWatch()
    register_optimizer_step_pre_hook(watch)
    register_optimizer_step_post_hook(watch.after_step)
    return watch


class UntrackedParameters:
    """Finds parameters that are not synchronised among those that optimizers update: parameters
    of the model that were replaced or unfrozen after `gs.replicate` (checking the model in every
    step costs much), and others. `known` are the ids of those that are synchronised."""

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        self._model = model
        self._known = known
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self, optimizer: Optimizer, *, own_step: bool) -> None:
        """Raise ConfigError when `optimizer` is about to update parameters that nobody
        synchronises: in its `own_step`, which other models' handles may take part in, or in this
        one's."""
        seen = optimizer in self._seen
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ours = any(id(p) in self._known for p in parameters)
        if seen and not ours:
            return  # of another model
        untracked = {
            id(p)
            for p in parameters
            if id(p) not in self._known and p.requires_grad and (p.grad is not None or not seen)
        }
        for name, parameter in self._model.named_parameters() if untracked else ():
            if id(parameter) in untracked:
                raise ConfigError(
                    f"parameter {name!r} was replaced or became trainable after gs.replicate: it "
                    "is not synchronised. Call close() on the handle and replicate the model again"
                )
        if untracked and own_step:
            untracked -= {i for other in optimizer_watch().present() for i in other.parameter_ids}
        if ours and untracked:
            raise ConfigError(
                "the optimizer also holds parameters outside of the replicated model "
                f"{shapes(optimizer, untracked)}, which ranks would update differently: replicate "
                "one module that holds all of them, or give those an optimizer of their own"
            )
        self._seen.add(optimizer)


def shapes(optimizer: Optimizer, ids: Collection[int] | None = None) -> str:
    """Groups and shapes of the parameters with these ids, or of all, for messages."""
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


def settings_of(optimizer: Optimizer, parameters: Sequence[Tensor], *, number: int = 0) -> Settings:
    """Class, hyper-parameters and parameters of each group; equal on ranks that step alike.

    Waits for tensors on a device. Objects count by their class, functions by their name: neither
    has a text that is the same on all ranks. `parameters` are the model's, in the order that all
    ranks have; `number` is the optimizer's place among those that step together.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    which = f" of optimizer {number}" if number else ""
    kind = type(optimizer)
    found = {f"the class{which or ' of the optimizer'}": f"{kind.__module__}.{kind.__qualname__}"}
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index}{which}"
        found |= {f"{name}{where}": _text(value) for name, value in options(group).items()}
        members = array("q", [places.get(id(parameter), -1) for parameter in group["params"]])
        held = _hash(array("q", sorted(members)).tobytes())[:8]
        found[f"the list of parameters{where}"] = f"{len(members)} ({held})"
        # A set has another one in each process, and states would be loaded for other parameters.
        found[f"the order of parameters{where}"] = _hash(members.tobytes())[:8]
    return found


def digest(settings: Settings) -> tuple[int, int]:
    """Two numbers of 20 bits, for `agree`; equal for different settings with probability 2**-40."""
    both = int(_hash(json.dumps(settings).encode()), 16)
    return both % 2**_BITS, both // 2**_BITS % 2**_BITS


def refuse_difference(comm: Communicator, settings: Settings, why: str) -> None:
    """Raise ConfigError on all ranks, since the digests of their `settings` differ: name the first
    that differs and each rank's value, then `why` (the consequence, and what to do).

    Two all-gathers (`all_gather_json`).
    """
    by_rank: list[Settings] = all_gather_json(comm, settings)
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        sides = group_ranks([settings.get(name, "nothing") for settings in by_rank])
        if len(sides) > 1:
            values = ", ".join(f"{name_ranks(ranks)} {value}" for value, ranks in sides.items())
            raise ConfigError(f"{name} differs: {values}; {_UNEVEN if name == STEPS else why}")
    raise ConfigError(f"ranks list their optimizers' options in another order; {why}")


def _text(value: Any) -> str:
    """Text that is the same on all ranks for equal values, whatever objects they are."""
    if isinstance(value, int | None | str | complex | Enum):
        # An enum's repr shows the member's value, which may be any object.
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, float):
        whole = abs(value) < 2**53 and value.is_integer()
        return repr(int(value)) if whole else repr(float(value))  # 1 and 1.0 are one learning rate
    if isinstance(value, Mapping):
        pairs = (
            (repr(key) if isinstance(key, str | int) else type(key).__qualname__, _text(entry))
            for key, entry in value.items()
        )
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in pairs) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(entry) for entry in value)})"
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return _text(value.tolist())
    return getattr(value, "__qualname__", type(value).__qualname__)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
