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
they arrive, and reading them needs no action by other ranks' programs, whose threads send. The
first steps are immediate. Then ranks decide together whether to be late: all of them, and not if
one has hooks that see gradients, an optimizer that looks at more than one element, a GradScaler, or
compiled code, which would be compiled again for waiting weights.

In the user's training loop `.grad` is whole when backward ends, and nothing is left for later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Done
from gradsync.errors import RunError
from gradsync.sync.buckets import Bucket
from gradsync.sync.ownership.elementwise import why_not_elementwise
from gradsync.sync.replicas import Replicas, WaitingWeights, clip_factor, has_compiled, scale_all
from gradsync.sync.step_metadata import options
from gradsync.sync.tree_exchange import ShardedNorm, TreeExchange
from gradsync.sync.watch import postponed, why_not_now

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")

_MEASURED = 3
"""Steps after the first one that decide whether to be late under `overlap_publish=auto`."""
_LEAST_WAIT = 0.1
"""Minimum share of a step spent waiting for sums that makes late sums worthwhile. They cost an
update per bucket, and messages in place of an all-reduce, which uses less of the processor."""


@dataclass(slots=True)
class _Pending:
    """A step whose update is not done yet."""

    buckets: list[Bucket]
    used: list[bool]
    factors: list[Any] = field(default_factory=list)
    """Factors from sums to the clipped mean: numbers and tensors [], in this order."""
    gathers: list[Work] = field(default_factory=list)
    """For each bucket, all ranks' shards on their way into `flat(0)`."""
    updates: list[tuple[Optimizer, list[dict[str, Any]]]] = field(default_factory=list)
    """Each optimizer, with the options of its groups in this step."""


class LateReplicas(Replicas):
    """Whole replicas that are updated at their next use; see the diagram at the top of the module.

    Args:
        model, comm: see `Replicas`.
        exchange: sums the buckets.
        measures: measure some steps first, and be late only if it pays.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        exchange: TreeExchange,
        *,
        measures: bool = False,
    ) -> None:
        super().__init__(model, comm)
        self._exchange, self._measures = exchange, measures
        self.by_halves = self._decided = False
        self._optimizers: Sequence[Optimizer] = ()
        self._scaled = False
        self._ended = 0.0
        self._waits: list[float] = []
        self._step: _Pending | None = None
        self._norm = ShardedNorm(self.parameters, comm, exchange)
        self.waiting = self._weights = WaitingWeights(model)

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Replicas.prepare`."""
        self._optimizers, self._scaled = optimizers, scaled

    def take(self, buckets: Sequence[Bucket], used: Sequence[bool], factor: float | None) -> None:
        """See `Replicas.take`; if sums are not whole, the step is left for later."""
        self._step, self.under_way = None, ()  # of a step that was refused after its sums
        if self._exchange.whole:
            super().take(buckets, used, factor)
            if factor is not None and self._optimizers and not self._decided:
                self._decide()
            return
        for parameter in self.parameters:
            parameter.grad = None
        if factor is not None:
            self._step = _Pending(list(buckets), list(used))
            self._multiply(self._step, factor)
        self.exposed.stop()

    def _decide(self) -> None:
        """Decide whether to be late, after the steps to measure.

        One all-reduce, once: whole group, float64 [1], on the CPU; overlaps nothing. The smallest
        wait counts: ranks with a longer one wait for the slowest rank, not for the network.
        """
        began, self._ended = self._ended, time.perf_counter()
        if self._measures:
            if began:
                self._waits.append(self.exposed.seconds() / (self._ended - began))
            if len(self._waits) < _MEASURED:
                return
        # A rank that cannot be late would wait for the second half without any overlap.
        share = 0.0 if (why := self._why_not()) else median(self._waits or [1.0])
        wait = torch.tensor([share], dtype=torch.float64)
        self.comm.all_reduce(wait, "min").wait()
        self._decided, self.by_halves = True, bool(wait >= _LEAST_WAIT)
        if self.comm.rank == 0:
            said = "go down beside the next forward" if self.by_halves else "stay in the step"
            reason = why or f"ranks wait {100 * float(wait):.0f} % of a step for them"
            log.info("sums %s: %s", said, reason)

    def _why_not(self) -> str:
        """Reason why the update cannot wait until weights are used, "" if it can."""
        if has_compiled():
            return "code would be compiled once more, for weights that wait"
        if self._scaled:
            return "a GradScaler looks at whole gradients"
        for optimizer in self._optimizers:
            if any(group.get("differentiable") for group in optimizer.param_groups):
                return "the optimizer is differentiable"
            if why := why_not_elementwise(type(optimizer)) or why_not_now(optimizer):
                return why
        return ""

    def owned(self) -> list[Tensor]:
        """See `Replicas.owned`; if sums are not whole, this rank's shards, possibly rounded."""
        if self._step is None:
            return super().owned()
        mine = [self._exchange.owned(b.plan.numel, self.comm.rank) for b in self._step.buckets]
        pairs = zip(self._step.buckets, mine, strict=True)
        return [bucket.flat(0)[span.start : span.stop] for bucket, span in pairs]

    def _multiply(self, step: _Pending, factor: Any) -> None:
        """Scale the shards, before they go to all ranks. Rounded nodes do not change until each
        rank has widened them."""
        pairs = zip(step.buckets, self.owned(), strict=True)
        scale_all([shard for bucket, shard in pairs if not bucket.rounded], factor)
        step.factors.append(factor)

    def whole_gradients(self) -> list[Tensor | None]:
        """See `Replicas.whole_gradients`; only for steps that are not late."""
        if self._step is not None:
            raise RunError("gradients come later: look at them with overlap_publish=False")
        return super().whole_gradients()

    def clip(self, max_norm: float) -> Tensor:
        if self._step is None:
            return super().clip(max_norm)
        factor = prod(map(float, self._step.factors))
        norm = self._norm.of(self._step.buckets, self.owned(), self._step.used, factor)
        self._multiply(self._step, clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Replicas.update`; fixes the update with the current options, and asks all owners for
        whole sums."""
        step = self._step
        if step is None:
            super().update(optimizers)
            return
        step.gathers = [self._exchange.gather(b) for b in reversed(step.buckets)][::-1]
        self.under_way = step.gathers if self._exchange.in_one_order else ()
        used = {id(p) for p, here in zip(self.parameters, step.used, strict=True) if here}
        for optimizer in optimizers:
            groups = [
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in options(g).items()}
                for g in optimizer.param_groups
            ]
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                if id(parameter) in used:  # the order in which the optimizer makes entries
                    optimizer.state.setdefault(parameter, {})
            step.updates.append((optimizer, groups))

    def publish(self) -> Work:
        """See `Replicas.publish`: from now on a forward waits for its weights' buckets."""
        if (step := self._step) is None or not step.updates:
            return Done()
        for optimizer, _ in step.updates:
            if "step" in optimizer.__dict__:  # a scheduler wraps it, to count steps
                optimizer.step()  # without gradients it changes nothing
        buckets = [bucket.parameters for bucket in step.buckets]
        update, end = partial(self._update_bucket, step), partial(self._end, step)
        self._weights.expect(buckets, step.gathers, update, end)
        return Done()

    def _update_bucket(self, step: _Pending, number: int) -> None:
        bucket = step.buckets[number]
        means = bucket.sums()
        for factor in step.factors if bucket.rounded else ():
            # Between tensors [] torch promotes dtypes; between [1] and [] it does not.
            scale_all([m if m.dim() else m.view(1) for m in means], factor)
        for parameter, slot, mean in zip(bucket.parameters, bucket.plan.slots, means, strict=True):
            parameter.grad = mean if step.used[slot.index] else None
        with record_function(f"update {number}"), postponed(bucket.parameters):
            for optimizer, groups in step.updates:
                now = [options(group) for group in optimizer.param_groups]
                for group, its in zip(optimizer.param_groups, groups, strict=True):
                    group.update(its)
                try:
                    type(optimizer).step(optimizer)  # of parameters that have a gradient
                finally:
                    for group, its in zip(optimizer.param_groups, now, strict=True):
                        group.update(its)
        for parameter in bucket.parameters:
            parameter.grad = None

    def _end(self, step: _Pending) -> None:
        for optimizer, _ in step.updates:
            for parameter in [p for p, entry in optimizer.state.items() if not entry]:
                del optimizer.state[parameter]  # of an optimizer that keeps no state
        self._step, self.under_way = None, ()

    def close(self) -> None:
        super().close()
        if self._step is not None and self._step.updates:  # given up: optimizers keep their state
            self._end(self._step)
