"""What watches a step: optimizers and weights outside of it, slow ranks, gradients not finite.

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
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import (
    current_graph_task,
    foreach_norm,
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

log = logging.getLogger("gradsync")


class OptimizerWatch:
    """The hooks, and whom they notify of each step."""

    def __init__(self) -> None:
        self.listeners = WeakValueDictionary[int, Any]()
        """Each model's `UserLoop`, in the order in which they were added: all ranks must notify
        them of a step in the same order."""
        self.numbers = itertools.count()
        """Gives each listener its number."""
        self.backwards: set[int] = set()
        """Graph task of each `GradientSync.backward` that is running."""

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
        # Not `values()`: another thread may add a listener meanwhile.
        found = [ref() for ref in self.listeners.valuerefs()]
        return [listener for listener in found if listener is not None]


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


@dataclass(eq=False)
class UntrackedParameters:
    """Finds parameters that an optimizer updates and no handle synchronises: those of a model that
    were replaced or unfrozen after `gs.replicate`, and parameters of no model. (Checking the
    whole model in every step is expensive.)"""

    model: nn.Module
    known: set[int]
    """Ids of synchronised parameters."""
    _reached: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
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
        outside = {id(p): p for p in held if id(p) not in self.known and p.requires_grad}
        if not outside:
            return
        refuse_replaced(self.model, outside)
        if own_step:
            owner_of = optimizer_watch().owner_of
            outside = {i: p for i, p in outside.items() if owner_of(p) is None}
        if any(id(p) in self.known for p in held):
            if not outside:
                return
            raise ConfigError(
                "the optimizer also holds parameters outside of the replicated model "
                f"{shapes(optimizer, outside)}: {_ONE_MODULE}"
            )
        self._reached[optimizer] = -1
        this, its = weakref.ref(self), weakref.ref(optimizer)

        def gradient_came(_: Tensor) -> None:
            alive, optimizer = this(), its()
            if alive is not None and optimizer is not None:
                alive._reached[optimizer] = current_graph_task()

        for parameter in outside.values():
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
        self._states.update((optimizer, optimizer.state) for optimizer in optimizers)

    def remember_late(self, weights: Iterable[Tensor]) -> None:
        """Accept weights that were updated after `remember`."""
        self._signs |= self._signs_now(w for w in weights if id(w) in self._signs)

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

    def refuse_unlike(self, optimizers: Iterable[Optimizer], *, changed: bool) -> None:
        """If weights have `changed` on some rank, compare them completely, and raise RunError on
        all ranks if they differ. Whole group, int64 [1], then the cost of `check_replicas`.
        Accept the state of `optimizers`, which ranks have just compared."""
        if changed:
            told = all_gather_numbers(self._comm, int(self._edited))
            self._edited = True
            edited = [rank for rank, number in enumerate(told) if number]
            check_replicas(self._named, self._comm, edited=edited)
            self._edited, self._turn = False, 0  # from here on all ranks sample the same elements
        # Now, since a hook may end the update.
        self._states.update((optimizer, optimizer.state) for optimizer in optimizers)

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


@dataclass(eq=False)
class Stopwatch:
    """Measures one interval: `start`, `stop`, and later `seconds()`.

    On CUDA it records events and reads them only on request, so that measuring does not
    synchronise the step. Wall-clock time would measure the launch there, not the work.
    """

    on_cuda: bool
    _first: Any = None
    _last: Any = None

    def start(self) -> None:
        """Mark the beginning."""
        self._first = self._now()

    def stop(self) -> None:
        """Mark the end. A copy (`copy.copy`) keeps this reading."""
        self._last = self._now()

    def seconds(self) -> float:
        """Time from `start` to `stop`, in seconds; waits until the GPU has reached `stop`.

        0.0 if one of them was never called.
        """
        if self._first is None or self._last is None:
            return 0.0
        if not self.on_cuda:
            return self._last - self._first
        self._last.synchronize()
        return self._first.elapsed_time(self._last) / 1000

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_WINDOW = 10
"""Number of steps that are examined together."""
_LAG, _LEAST_LAG_S = 0.2, 0.001
"""How long the others must wait for a rank: share of a step, and seconds."""


class StragglerWatch:
    """Warns of a rank that the others repeatedly wait for.

    A backward takes equally long on a slow rank and on the others, because all wait in it for the
    slowest. But the slowest rank waits least. A rank is named if in nine of ten steps it has waited
    less than all others, in the median by a fifth of a step and 1 ms. So a pause (a checkpoint by
    rank 0, an evaluation) does not count, nor does noise that affects one rank after the other.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._steps: list[tuple[float, float, int, Stopwatch]] = []
        self._ended = 0.0
        self._said = -1

    def step_ends(self, exposed: Stopwatch, met_s: float, micro_batches: int = 0) -> None:
        """Record a step with this number of `micro_batches` (0: unknown). This rank has waited for
        `exposed`, or for `met_s` seconds until all ranks arrived (strategies wait in different
        places). Every tenth time one all-gather: whole group, float64 [30], CPU; no overlap."""
        now = time.perf_counter()
        if self._ended and self._comm.world_size > 1:
            self._steps.append((now - self._ended, met_s, micro_batches, exposed))
        self._ended = now
        if len(self._steps) > _WINDOW:  # one step more, to avoid waiting for a GPU
            steps = self._steps[:_WINDOW]
            rows = [(wall, max(met, watch.seconds()), n) for wall, met, n, watch in steps]
            mine = torch.tensor(rows, dtype=torch.float64)
            everyone = torch.zeros(self._comm.world_size * mine.numel(), dtype=torch.float64)
            self._comm.all_gather(everyone, mine.flatten()).wait()
            self._steps.clear()
            slow, said = find_straggler(everyone.view(-1, *mine.shape))
            if said and slow != self._said and self._comm.rank == 0:
                log.warning(said)
            self._said = slow


def find_straggler(ranks: Tensor) -> tuple[int, str]:
    """The rank that all others wait for, and the message about it; (-1, "") for no such rank.

    Args:
        ranks: seconds of a step and of waiting for others, and micro-batches, [W, steps, 3].
    """
    waits = ranks[:, :, 1]
    least = waits.argmin(0)
    slow = int(least.mode().values)
    wall, _, micro_batches = (float(part.median()) for part in ranks[slow].unbind(1))
    others = torch.cat([waits[:slow], waits[slow + 1 :]]).min(0).values
    lag = float((others - waits[slow]).median())
    if int((least == slow).sum()) < 0.9 * len(least) or lag < max(_LAG * wall, _LEAST_LAG_S):
        return -1, ""
    waited = f"the others wait for it, {100 * lag / wall:.0f} % of each step ({wall:.2g} s)"
    dealt = ranks[:, :, 2].median(1).values
    own = (ranks[:, :, 0].median(1).values - waits.median(1).values) / dealt.clamp(min=1)
    if micro_batches > dealt.min() and own[slow] < (1 + _LAG) * own[dealt > 0].median():
        return slow, (
            f"rank {slow} has {micro_batches:.0f} of a step's {int(dealt.sum())} micro-batches: "
            f"{waited}; a number that divides evenly among {len(ranks)} ranks would save that"
        )
    return slow, f"rank {slow} is slow: {waited}"


SMALL = 16_384
"""Largest size, in elements, of a gradient that is checked in every step: a norm's, a bias's."""
_CUDA_STEPS = 100
"""Steps between two checks of the gradients on CUDA, where each check waits for the device."""


@dataclass(eq=False)
class NonFinite:
    """Warns when this rank's gradients become nan or inf, before sums hide which rank caused it.
    Warns once, until they are finite again.

    Per step: `look` before gradients are sent, in one or several parts; then `step_ends`. A
    non-finite value in one layer's activations reaches norms and biases of all layers before it.
    """

    _step: int = 0
    _said: bool = False
    _found: list[str] = field(default_factory=list)

    def is_due(self, *, on_cuda: bool) -> bool:
        """Whether to check in this step."""
        return not on_cuda or self._step % _CUDA_STEPS == 0

    def look(
        self, parts: Sequence[Tensor], named: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Note the names of gradients that are not finite.

        Args:
            parts: memory of gradients, read once. Names are read only if a part is not finite.
            named: the gradients.
        """
        plain = [p for p in parts if p.is_floating_point() and p.layout == torch.strided]
        if len(plain) == len(parts) and (
            not plain or torch.stack(foreach_norm(plain)).isfinite().all()
        ):
            return
        if found := non_finite(named()):
            self._found.append(found)

    def step_ends(self, rank: int) -> None:
        """Warn about this step's findings; the step number counts from this model's first step."""
        self._step += 1
        if self._found and not self._said:
            log.warning(
                "rank %d, step %d: nan or inf in this rank's gradient of %s; every rank gets it "
                "with the next sum or average",
                *(rank, self._step, ", ".join(self._found)),
            )
        self._said, self._found = bool(self._found), []
