"""The step between hosts: sums are made during backward and sent to all ranks during the forward.

    backward    each bucket: slices to their owners, sums there        (first half of an all-reduce)
    step        agree; the norm, from the owners; the update to be done is fixed
    forward     each bucket: the sum from its owners to all ranks      (the second half)
                before the forward uses a weight: wait for its bucket, update it, go on

An all-reduce consists of these two halves (Patarasuk & Yuan 2009). Only the first must end before
the next forward begins: "decoupled all-reduce", DeAR (Zhang et al. 2023, arXiv 2302.12445). The
bytes are those of one all-reduce. Every number is computed as in an immediate update, so bits are
the same. The forward needs the last bucket first, so buckets are sent in reverse order.

Every rank updates everything, as its optimizer would. State and weights are whole on each rank once
they arrive, and reading them needs no action by other ranks' programs, whose threads send. So each
rank decides by itself whether it updates late or immediately. It updates immediately for hooks that
see gradients, optimizers that look at more than one element, a GradScaler, weights whose memory
another tensor shares, and programs that compile, which would compile again for waiting weights.

In the user's training loop `.grad` is whole when backward ends, and nothing is left for later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import AllOf, Done
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
from gradsync.sync.norms import clip_factor, scale_all
from gradsync.sync.ownership.elementwise import (
    PieceOptimizer,
    check_elementwise,
    group_numbers,
    members_of,
)
from gradsync.sync.reducer import Replicas, Stopwatch
from gradsync.sync.step_metadata import options
from gradsync.sync.tree_exchange import ShardedNorm, TreeExchange
from gradsync.sync.waiting_weights import WaitingWeights, has_compiled
from gradsync.sync.watch import why_not_now

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")

_MEASURED = range(1, 4)
"""Steps, counted from 0, that decide whether sums are sent late under `overlap_publish=auto`; up to
then sums are whole when a step ends."""
_LEAST_WAIT = 0.1
"""Minimum share of a step spent waiting for sums that makes late sums worthwhile. They cost an
update per bucket, and messages in place of an all-reduce, which uses less of the processor."""


class _Update(NamedTuple):
    """What one optimizer has to do."""

    optimizer: Optimizer
    """The optimizer that the user made."""
    state: Any
    """Its state; the user may load another state before the update is done."""
    groups: list[dict[str, Any]]
    """The options of its groups in this step."""
    parts: list[PieceOptimizer]
    """Optimizers of each bucket's parameters."""


@dataclass(slots=True)
class _Pending:
    """A step whose update is not done yet."""

    buckets: list[Bucket]
    used: list[bool]
    factors: list[Any] = field(default_factory=list)
    """Factors from sums to the clipped mean: numbers and tensors [], in this order."""
    gathers: list[Work] = field(default_factory=list)
    """For each bucket, all ranks' shards on their way into `flat(0)`."""
    updates: list[_Update] = field(default_factory=list)


class LateReplicas(Replicas):
    """Whole replicas that are updated at their next use; see the diagram at the top of the module.

    Args:
        model, parameters: see `Replicas`.
        comm: all ranks.
        exchange: sums the buckets.
        measures: measure some steps first, and be late only if it pays.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        exchange: TreeExchange,
        *,
        measures: bool = False,
    ) -> None:
        super().__init__(model, parameters)
        self._comm, self._exchange = comm, exchange
        self.by_halves = not measures
        self._taken, self._ended = 0 if measures else _MEASURED.stop, 0.0
        self._waits: list[float] = []
        self._step: _Pending | None = None
        self._why = self._said = ""
        self._scaler = False
        self._kinds: dict[type[Optimizer], str] = {}
        self._parts: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._norm = ShardedNorm(self.parameters, comm, exchange)
        self._weights = WaitingWeights(model)

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Replicas.prepare`; if it finds a reason, this rank updates immediately."""
        self._scaler = scaled
        self._why = next(filter(None, (_why_at_once(o, self._kinds) for o in optimizers)), "")

    def take(
        self,
        buckets: Sequence[Bucket],
        used: Sequence[bool],
        factor: float | None,
        watch: Stopwatch,
    ) -> None:
        """See `Replicas.take`; requests sums that are not whole from all their owners."""
        self._step = None  # of a step that was refused after its sums
        if self._exchange.whole:
            super().take(buckets, used, factor, watch)
            if self._taken < _MEASURED.stop:
                self._measure(watch)
            return
        for parameter in self.parameters:
            parameter.grad = None
        if factor is not None:
            self._step = _Pending(list(buckets), list(used))
            self._multiply(factor)
            if self._scaler:
                self._put_into_grad()
        watch.stop()

    def _measure(self, watch: Stopwatch) -> None:
        """Note the share of the step spent waiting for whole sums; after the last step, decide.

        One all-reduce, once: whole group, float64 [1], on the CPU; overlaps nothing. The smallest
        wait counts: ranks with a longer one wait for the slowest rank, not for the network.
        """
        began, self._ended = self._ended, time.perf_counter()
        if self._taken in _MEASURED:
            self._waits.append(watch.seconds() / (self._ended - began))
        self._taken += 1
        if self._taken == _MEASURED.stop:
            # A rank that cannot be late would wait for the second half without any overlap.
            share = 0.0 if self._why or self._scaler else median(self._waits)
            wait = torch.tensor([share], dtype=torch.float64)
            self._comm.all_reduce(wait, "min").wait()
            self.by_halves = bool(wait >= _LEAST_WAIT)
            if self._comm.rank == 0:
                said = "go down beside the next forward" if self.by_halves else "stay in the step"
                log.info("sums %s: ranks wait %.0f %% of a step for them", said, 100 * float(wait))

    def _gathers(self) -> list[Work]:
        """Ask all owners for whole sums, once per step; one work per bucket."""
        step = self._step
        assert step is not None, "the caller has one"
        if not step.gathers:
            step.gathers = [self._exchange.gather(b) for b in reversed(step.buckets)][::-1]
        return step.gathers

    def _put_into_grad(self) -> None:
        """Wait for whole gradients, and continue as ordinary replicas."""
        AllOf(self._gathers()).wait()
        step = self._step
        assert step is not None, "the caller has one"
        for bucket in step.buckets:
            for parameter, mean in zip(bucket.parameters, self._means(bucket), strict=True):
                parameter.grad = mean
        self._step = None

    def owned(self) -> list[Tensor]:
        """See `Replicas.owned`; if sums are not whole, this rank's shards, possibly rounded."""
        if (step := self._step) is None:
            return super().owned()
        return [self._own(bucket) for bucket in step.buckets]

    def _own(self, bucket: Bucket) -> Tensor:
        mine = self._exchange.owned(bucket.plan.numel, self._comm.rank)
        return bucket.flat(0)[mine.start : mine.stop]

    def _multiply(self, factor: Any) -> None:
        """Scale the gradient: its shards, before they go to all ranks. Rounded nodes do not change
        until each rank has widened them."""
        step = self._step
        assert step is not None, "the caller has one"
        AllOf(step.gathers).wait()  # if an observer has requested them
        part = (lambda bucket: bucket.flat(0)) if step.gathers else self._own
        scale_all([part(bucket) for bucket in step.buckets if not bucket.rounded], factor)
        step.factors.append(factor)

    def _means(self, bucket: Bucket, *, copies: bool = False) -> list[Tensor | None]:
        """The gradient of each of the bucket's parameters, once whole sums have arrived; None for a
        parameter without a gradient on any rank."""
        step = self._step
        assert step is not None, "the caller has one"
        means = bucket.sums()
        if copies:
            means = [mean.clone() for mean in means]
        for factor in step.factors if bucket.rounded else ():
            # Between tensors [] torch promotes dtypes; between [1] and [] it does not.
            scale_all([m if m.dim() else m.view(1) for m in means], factor)
        slots = zip(bucket.plan.slots, means, strict=True)
        return [mean if step.used[slot.index] else None for slot, mean in slots]

    def whole_gradients(self) -> list[Tensor | None]:
        step = self._step
        if step is None:
            return super().whole_gradients()
        AllOf(self._gathers()).wait()
        found: list[Tensor | None] = [None] * len(self.parameters)
        for bucket in step.buckets:
            means = self._means(bucket, copies=True)
            for slot, mean in zip(bucket.plan.slots, means, strict=True):
                found[slot.index] = mean
        return found

    def clip(self, max_norm: float) -> Tensor:
        if (step := self._step) is None:
            return super().clip(max_norm)
        factor = prod(map(float, step.factors))
        norm = self._norm.of(step.buckets, self.owned(), step.used, factor)
        self._multiply(clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Replicas.update`; fixes the update with the current options."""
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
            state = optimizer.state
            groups = [
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in options(g).items()}
                for g in optimizer.param_groups
            ]
            used = {id(p) for p, here in zip(self.parameters, step.used, strict=True) if here}
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                if id(parameter) in used:  # the order in which the optimizer makes entries
                    state.setdefault(parameter, {})
            parts = self._parts_of(optimizer, step.buckets)
            step.updates.append(_Update(optimizer, state, groups, parts))

    def _parts_of(self, optimizer: Optimizer, buckets: list[Bucket]) -> list[PieceOptimizer]:
        """The optimizer over each bucket's parameters, with the user's optimizer state."""
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

    def settle(self) -> None:
        """See `Replicas.settle`: waits for whole sums."""
        if self._step is not None and self._exchange.in_one_order:
            AllOf(self._step.gathers).wait()

    def publish(self) -> Work:
        """See `Replicas.publish`: from now on a forward waits for its weights' buckets."""
        if (step := self._step) is None or not step.updates:
            return Done()
        for update in step.updates:
            if "step" in update.optimizer.__dict__:  # a scheduler wraps it, to count steps
                update.optimizer.step()  # without gradients it changes nothing
        buckets = [bucket.parameters for bucket in step.buckets]
        self._weights.expect(
            *(buckets, step.gathers, self._update_bucket), late=True, ended=self._end
        )
        return Done()

    def wait(self) -> None:
        """See `Replicas.wait`."""
        self._weights.wait()

    def _update_bucket(self, number: int) -> None:
        step = self._step
        assert step is not None, "until the last bucket's update"
        bucket = step.buckets[number]
        means = dict(zip(map(id, bucket.parameters), self._means(bucket), strict=True))
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
                del update.state[parameter]  # of an optimizer that keeps no state

    def close(self) -> None:
        self._weights.close()
        if self._step is not None and self._step.updates:  # given up: optimizers keep their state
            self._end()


def _why_at_once(optimizer: Optimizer, known: dict[type[Optimizer], str]) -> str:
    """Reason why the update cannot wait until weights are used, "" if it can; `known` holds the
    reasons by class."""
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
