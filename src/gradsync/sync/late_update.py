"""The step between hosts: gradients are summed beside backward, and handed out beside the forward.

    backward    each bucket: slices to their owners, sums there        (half of an all-reduce)
    step        agree; the norm, from the owners; which update is to be done is fixed
    forward     each bucket: the sum from its owners to all ranks      (the other half)
                a weight that the forward is about to use: wait for its bucket, update it, go on

An all-reduce is these two halves (Patarasuk & Yuan 2009), and only the first has to end before the
next forward begins: "decoupled all-reduce", DeAR (Zhang et al. 2023, arXiv 2302.12445). Bytes are
those of one all-reduce, and every number is computed as it would be at once, so bits are the same.
The forward wants the last bucket first, so they are handed out in reverse.

Every rank updates everything, as its optimizer would: state and weights are whole on each rank once
they are there, and reading them asks nothing of other ranks' programs, whose threads send. So it
is each rank's own affair whether it updates late or at once. At once it is done for hooks that see
gradients, optimizers that look at more than an element, a GradScaler, weights whose memory another
tensor shares, and programs that compile, which would do it again for weights that wait.

In the user's training loop `.grad` is whole when backward ends, and nothing is left for later.

[Note: Waiting] A parameter is marked by its class, which torch asks before every function and
attribute that gets the tensor: in the forward of any module, in `state_dict`, `deepcopy`,
`torch.save`, NumPy, averages of weights that hold references, on any thread. When its update is
done the class is put back, so that a parameter costs nothing from then on. Looks at its shape and
the like do not wait.

Not noticed: memory that another tensor shares (`can_be_marked` finds it), and C++ code that gets
the tensor past torch's functions. So modules wait for their own parameters before a forward, too.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import AllOf, Done
from gradsync.core.torch_private import (
    FRAMES,
    as_plain_tensors,
    foreach_mul_,
    storage_address,
    storage_uses,
)
from gradsync.errors import ConfigError, RunError
from gradsync.sync.buckets import Bucket
from gradsync.sync.elementwise import (
    PieceOptimizer,
    check_elementwise,
    group_numbers,
    members_of,
)
from gradsync.sync.reducer import Replicas, Stopwatch, clip_factor
from gradsync.sync.step_metadata import options
from gradsync.sync.tree_exchange import ShardedNorm, TreeExchange
from gradsync.sync.watch import why_not_now

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


# -- waiting for a weight --------------------------------------------------------------------------

_ARRIVE = "_gradsync_arrive"
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "is_leaf"),
    *("grad", "grad_fn", "is_cuda", "is_cpu", "is_sparse"),
)
_LOOKS = frozenset(
    {
        *(attrgetter("__get__")(getattr(Tensor, name)) for name in _ATTRIBUTES),
        *(Tensor.size, Tensor.stride, Tensor.numel, Tensor.dim, Tensor.is_contiguous),
        *(Tensor.is_inference, Tensor.element_size),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    }
)
"""What can be asked without the values."""


class PendingParameter(nn.Parameter):
    """A parameter while its new value is on its way."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for all pending parameters among the arguments, then call `func`."""
        kwargs = kwargs or {}
        if func in _LOOKS:
            with as_plain_tensors():
                return func(*args, **kwargs)
        for parameter in _pending([args, kwargs]):
            wait_for(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(proto)


def mark(parameters: Iterable[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Call `arrive` before one of `parameters` is touched; it calls `unmark` with all of them."""
    for parameter in parameters:
        vars(parameter)[_ARRIVE] = arrive
        parameter.__class__ = PendingParameter


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Make ordinary parameters of them again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
        vars(parameter).pop(_ARRIVE, None)


def is_pending(tensor: Tensor) -> bool:
    """Whether a parameter is marked."""
    return type(tensor) is PendingParameter


def wait_for(tensor: Tensor) -> None:
    """Wait for a parameter, if it is marked."""
    arrive = vars(tensor).get(_ARRIVE) if is_pending(tensor) else None
    if arrive is not None:
        arrive()


def can_be_marked(parameter: nn.Parameter, own: int = 1) -> bool:
    """Whether every way to its values leads through the object itself, or another of the caller's
    `own` tensors: none else (a view, a `detach()`, a NumPy array over it) shares its memory, and no
    class of its own reads it."""
    return type(parameter) is nn.Parameter and _uses(parameter) == own and _is_ours(parameter)


def _is_ours(parameter: Tensor) -> bool:
    """Whether torch owns its memory, and no other process sees it."""
    return parameter.untyped_storage().resizable() and not (
        parameter.is_cpu and parameter.is_shared()
    )


def _uses(parameter: Tensor) -> int:
    """Number of tensors and arrays that share its memory, itself among them."""
    storage = parameter.untyped_storage()  # this object is one, too
    return storage_uses(storage_address(storage)) - 1


def _pending(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_pending(value):
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _pending(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _pending(each)


class WaitingWeights:
    """A model's weights after a step: each is brought up to date before it is first touched.

    Args:
        model: whose modules wait for their own parameters before their forward.
    """

    def __init__(self, model: nn.Module) -> None:
        own = [(m, list(m.parameters(recurse=False))) for m in model.modules()]
        self._modules = [m for m, held in own if any(p.requires_grad for p in held)]
        self._lock = threading.RLock()
        self._works: dict[int, Work] = {}
        self._buckets: Sequence[Sequence[nn.Parameter]] = ()
        self._hooks: list[Any] = []
        self._broken = ""

    def expect(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        works: Sequence[Work],
        update: Callable[[int], object],
        ended: Callable[[], object],
        *,
        late: bool,
    ) -> None:
        """Call `update(number)` once for each bucket, when its work is done and one of its
        parameters is touched, or now, unless `late`; and `ended()` after the last."""
        with self._lock:
            self._buckets, self._update, self._ended = buckets, update, ended
            self._works = dict(enumerate(works))
            if not late:
                self.wait()
                return
            for number, bucket in enumerate(buckets):
                mark(bucket, lambda number=number: self._arrive(number))
            self._hooks = [m.register_forward_pre_hook(_wait_for_own) for m in self._modules]

    def wait(self) -> None:
        """Bring all of them up to date; asks nothing of other ranks."""
        with self._lock:
            for number in reversed(range(len(self._buckets))):
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of a bucket, whatever mode the code that touched them runs in: state
        that is made in inference mode could not be changed."""
        modes = (torch.no_grad(), torch.inference_mode(False))
        # Marked until the end: another thread must not find half of an update.
        with self._lock, modes[0], modes[1], as_plain_tensors():
            if self._broken:
                raise RunError(f"{self._broken}: go back to a checkpoint")
            if number not in self._works:
                return
            self._works[number].wait()
            self._broken = f"the update of weights was interrupted at bucket {number}"
            del self._works[number]
            kind = self._buckets[number][0].device.type
            with torch.autocast(kind, enabled=False):
                self._update(number)
            unmark(self._buckets[number])
            self._broken = ""
            if not self._works:
                self._ended()
                for hook in self._hooks:
                    hook.remove()
                self._hooks, self._buckets = [], ()


def _wait_for_own(module: nn.Module, _: Any) -> None:
    for parameter in module.parameters(recurse=False):
        wait_for(parameter)


class WaitingState(MutableMapping[Any, Any]):
    """Stands for `optimizer.state` while updates are on their way: the first look waits.

    Args:
        state: the optimizer's own.
        arrive: makes the updates, and puts `state` back into the optimizer.
    """

    def __init__(self, state: MutableMapping[Any, Any], arrive: Callable[[], None]) -> None:
        self.own, self._arrive = state, arrive

    def _there(self) -> MutableMapping[Any, Any]:
        self._arrive()
        return self.own

    def __getitem__(self, key: Any) -> Any:
        return self._there()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._there()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._there()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._there()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def __getattr__(self, name: str) -> Any:
        """Whatever else the state can do (`copy`, `default_factory`)."""
        return getattr(self._there(), name)

    def __repr__(self) -> str:
        return repr(self._there())

    def __reduce__(self) -> Any:
        return self._there().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._there(), memo)


# -- the step -------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """What one optimizer has to do."""

    optimizer: Optimizer
    """The user's."""
    state: Any
    """Its state; another one may be loaded before the update is done."""
    groups: list[dict[str, Any]]
    """Its groups' options in this step."""
    parts: list[PieceOptimizer]
    """Optimizers of each bucket's parameters."""


@dataclass(slots=True)
class _Pending:
    """A step whose update is not done yet."""

    buckets: list[Bucket]
    used: list[bool]
    factors: list[Any] = field(default_factory=list)
    """From sums to the clipped mean: numbers and tensors [], in this order."""
    gathers: list[Work] = field(default_factory=list)
    """For each bucket, all ranks' shards on their way into `flat(0)`."""
    updates: list[_Update] = field(default_factory=list)


class LateReplicas(Replicas):
    """Whole replicas that are updated when they are next used, see the module's picture.

    Args:
        model, parameters: see `Replicas`.
        comm: all ranks.
        exchange: sums the buckets.
    """

    late = True

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        exchange: TreeExchange,
    ) -> None:
        super().__init__(model, parameters)
        self._comm, self._exchange = comm, exchange
        self._step: _Pending | None = None
        self._why = self._said = ""
        self._scaler = False
        self._kinds: dict[type[Optimizer], str] = {}
        self._parts: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._norm = ShardedNorm(self.parameters, comm, exchange)
        self._weights = WaitingWeights(model)

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Replicas.prepare`; a reason found here lets this rank update at once."""
        self._scaler = scaled
        self._why = next(filter(None, (_why_at_once(o, self._kinds) for o in optimizers)), "")

    def take(
        self,
        buckets: Sequence[Bucket],
        used: Sequence[bool],
        factor: float | None,
        watch: Stopwatch,
    ) -> None:
        """See `Replicas.take`; sums that are not whole are asked for here, of all owners."""
        self._step = None  # one that was refused after its sums
        if self._exchange.whole:
            super().take(buckets, used, factor, watch)
            return
        self.model.zero_grad(set_to_none=True)
        if factor is not None:
            self._step = _Pending(list(buckets), list(used))
            self._multiply(factor)
            if self._scaler:
                self._put_into_grad()
        watch.stop()

    def _gathers(self) -> list[Work]:
        """Ask all owners for whole sums, once a step; for each bucket."""
        step = self._step
        assert step is not None, "the caller has one"
        if not step.gathers:
            # The forward wants the last bucket first.
            step.gathers = [self._exchange.gather(b) for b in reversed(step.buckets)][::-1]
        return step.gathers

    def _put_into_grad(self) -> None:
        """Wait for whole gradients, and go on as ordinary replicas."""
        AllOf(self._gathers()).wait()
        for bucket, used in self._with_used():
            for parameter, mean, here in zip(
                bucket.parameters, self._means(bucket), used, strict=True
            ):
                parameter.grad = mean if here else None
        self._step = None

    def _with_used(self) -> list[tuple[Bucket, list[bool]]]:
        """Each bucket, and which of its parameters any rank has a gradient for."""
        step = self._step
        assert step is not None, "the caller has one"
        return [(b, [step.used[slot.index] for slot in b.plan.slots]) for b in step.buckets]

    def owned(self) -> list[Tensor]:
        """See `Replicas.owned`; of sums that are not whole, this rank's shards."""
        if (step := self._step) is None:
            return super().owned()
        shards = [self._own(bucket) for bucket in step.buckets]
        return [
            shard.to(bucket.dtype).mul_(prod(map(float, step.factors))) if bucket.rounded else shard
            for bucket, shard in zip(step.buckets, shards, strict=True)
        ]

    def _own(self, bucket: Bucket) -> Tensor:
        mine = self._exchange.owned(bucket, self._comm.rank)
        return bucket.flat(0)[mine.start : mine.stop]

    def _multiply(self, factor: Any) -> None:
        """Scale the gradient: shards of it, before they go to all ranks. Rounded nodes stay as they
        are until each rank has widened them."""
        step = self._step
        assert step is not None, "the caller has one"
        if isinstance(factor, float) and factor == 1.0:
            return
        AllOf(step.gathers).wait()  # if an observer has asked for them
        part = (lambda bucket: bucket.flat(0)) if step.gathers else self._own
        plain = [part(bucket) for bucket in step.buckets if not bucket.rounded]
        if plain:
            foreach_mul_(plain, factor)
        step.factors.append(factor)

    def _means(self, bucket: Bucket, *, copies: bool = False) -> list[Tensor]:
        """The gradient of each of the bucket's parameters, once whole sums are there."""
        step = self._step
        assert step is not None, "the caller has one"
        means = bucket.sums()
        if copies:
            means = [mean.clone() for mean in means]
        for factor in step.factors if bucket.rounded else ():
            # Between tensors [] torch promotes dtypes; between [1] and [] not.
            foreach_mul_([m if m.dim() else m.view(1) for m in means], factor)
        return means

    def whole_gradients(self) -> list[Tensor | None]:
        step = self._step
        if step is None:
            return super().whole_gradients()
        AllOf(self._gathers()).wait()
        found: list[Tensor | None] = [None] * len(self.parameters)
        for bucket, used in self._with_used():
            means = self._means(bucket, copies=True)
            for slot, mean, here in zip(bucket.plan.slots, means, used, strict=True):
                found[slot.index] = mean if here else None
        return found

    def clip(self, max_norm: float) -> Tensor:
        if (step := self._step) is None:
            return super().clip(max_norm)
        norm = self._norm.of(step.buckets, step.used, step.factors)
        self._multiply(clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Replicas.update`; fixes what is to be done, with the options of now."""
        step = self._step
        if step is not None:
            self._gathers()
            if self._why:
                if self._why != self._said and self._comm.rank == 0:
                    log.info("weights are updated before the next forward: %s", self._why)
                self._said = self._why
                self._put_into_grad()
        if step is None or self._why:
            super().update(optimizers)
            return
        for optimizer in optimizers:
            state = getattr(optimizer.state, "own", optimizer.state)
            groups = [
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in options(g).items()}
                for g in optimizer.param_groups
            ]
            used = {id(p) for p, here in zip(self.parameters, step.used, strict=True) if here}
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                if id(parameter) in used:  # entries in the order in which the optimizer makes them
                    state.setdefault(parameter, {})
            parts = self._parts_of(optimizer, step.buckets)
            step.updates.append(_Update(optimizer, state, groups, parts))

    def _parts_of(self, optimizer: Optimizer, buckets: list[Bucket]) -> list[PieceOptimizer]:
        """The optimizer over the parameters of each bucket, with the state of the user's."""
        members = members_of(optimizer)
        known = self._parts.get(optimizer)
        if known is None or known[0] != members or known[1] != buckets:
            numbers = group_numbers(optimizer.param_groups)
            parts = [
                PieceOptimizer(
                    *(type(optimizer), optimizer.defaults, optimizer.param_groups),
                    [(numbers[id(p)], p) for p in bucket.parameters if id(p) in numbers],
                )
                for bucket in buckets
            ]
            known = self._parts[optimizer] = (members, buckets, parts)
        return known[2]

    def publish(self) -> Work:
        """See `Replicas.publish`: from here on who touches a weight waits for its bucket."""
        if (step := self._step) is None or not step.updates:
            return Done()
        for update in step.updates:
            if "step" in update.optimizer.__dict__:  # a scheduler wraps it, to count
                update.optimizer.step()  # without gradients it changes nothing
        late = all(map(can_be_marked, self.parameters))
        if late:
            for update in step.updates:
                vars(update.optimizer)["state"] = WaitingState(update.state, self.wait)
        buckets = [bucket.parameters for bucket in step.buckets]
        self._weights.expect(buckets, step.gathers, self._update_bucket, self._end, late=late)
        return Done()

    def wait(self) -> None:
        """See `Replicas.wait`."""
        self._weights.wait()

    def _update_bucket(self, number: int) -> None:
        step = self._step
        assert step is not None, "until the last bucket's update"
        bucket, used = self._with_used()[number]
        means = {
            id(p): mean if here else None
            for p, mean, here in zip(bucket.parameters, self._means(bucket), used, strict=True)
        }
        with record_function(f"update {number}"), self.updates(bucket.parameters):
            for update in step.updates:
                part = update.parts[number]
                if part.inner is not None:
                    part.inner.state = update.state
                    ours = [p for group in part.inner.param_groups for p in group["params"]]
                    part.step(update.groups, [(p, means[id(p)]) for p in ours])

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None, "until now"
        for update in step.updates:
            for parameter in [p for p, entry in update.state.items() if not entry]:
                del update.state[parameter]  # of an optimizer that keeps nothing
            if isinstance(update.optimizer.state, WaitingState):  # else: loaded since
                update.optimizer.state = update.state

    def close(self) -> None:
        self.wait()


def has_compiled() -> bool:
    """Whether this process has compiled anything (or may have: where torch does not count)."""
    frames = sys.modules.get(FRAMES)
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


def _why_at_once(optimizer: Optimizer, known: dict[type[Optimizer], str]) -> str:
    """Reason why the update cannot wait until weights are used, "" if it can; `known` are those of
    classes."""
    if has_compiled():
        return "code would be compiled once more, for weights that wait"
    kind = type(optimizer)
    if kind not in known:
        known[kind] = ""
        try:
            check_elementwise(kind, False)
        except ConfigError as error:
            known[kind] = str(error)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return known[kind] or why_not_now(optimizer)
