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
tensor shares, and compiled code, which reads weights past torch's functions.

In the user's training loop `.grad` is whole when backward ends, and nothing is left for later.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import AllOf, Done
from gradsync.core.torch_private import foreach_mul_, has_compiled
from gradsync.errors import ConfigError, RunError
from gradsync.sync.buckets import Bucket
from gradsync.sync.elementwise import (
    PieceOptimizer,
    check_elementwise,
    group_numbers,
    members_of,
    why_not_now,
)
from gradsync.sync.layout import BLOCK, ParameterBlock, blocks_of
from gradsync.sync.pending import (
    WaitingState,
    can_be_marked,
    mark,
    own_state,
    unmark,
    wait_for,
)
from gradsync.sync.reducer import (
    Replicas,
    Stopwatch,
    clip_factor,
    norm_from_blocks,
    norms_of_blocks,
)
from gradsync.sync.step_metadata import options
from gradsync.sync.tree_exchange import TreeExchange

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


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


Pieces = list[tuple[ParameterBlock, list[tuple[int, int, int]]]]
"""Blocks, each with its pieces: (rank that has it, first element in the bucket, last + 1)."""


def pieces_of_rank(blocks: Sequence[ParameterBlock], spans: Sequence[range], rank: int) -> Pieces:
    """The blocks of which `rank` has a piece, cut where the ranks' `spans` end; the first piece's
    rank takes the block's norm."""
    in_order = sorted((span.start, span.stop, holder) for holder, span in enumerate(spans) if span)
    starts = [start for start, _, _ in in_order]
    found = []
    for block in blocks:
        place, pieces = bisect_right(starts, block.start) - 1, []
        while place < len(in_order) and in_order[place][0] < block.stop:
            start, stop, holder = in_order[place]
            pieces.append((holder, max(start, block.start), min(stop, block.stop)))
            place += 1
        if any(holder == rank for holder, _, _ in pieces):
            found.append((block, pieces))
    return found


class ShardedNorm:
    """The norm of gradients in shards, with the bits of whole ones: see [Note: Fixed blocks] in
    reducer.py. Each rank takes the norms of the blocks that begin in its shards.

    Args:
        parameters: in the order in which their norms are added.
        comm: all ranks.
        exchange: says what each rank has of a bucket, and sends pieces of blocks.
    """

    def __init__(
        self, parameters: Sequence[Tensor], comm: Communicator, exchange: TreeExchange
    ) -> None:
        self._parameters, self._comm, self._exchange = list(parameters), comm, exchange
        self._counts = torch.tensor([-(-p.numel() // BLOCK) for p in parameters])
        self._firsts = [0, *self._counts.cumsum(0).tolist()]
        self._pieces: WeakKeyDictionary[Bucket, tuple[Any, Pieces]] = WeakKeyDictionary()

    def of(self, buckets: Sequence[Bucket], used: Sequence[bool], factors: Sequence[Any]) -> Tensor:
        """The norm, []: of all parameters that are `used`.

        One all-reduce: whole group, float64 [blocks]; overlaps nothing.

        Args:
            buckets: each rank's shard is scaled already, unless its nodes are rounded.
            used: for each parameter, whether its gradient counts.
            factors: what shards with rounded nodes are scaled by first.
        """
        device = self._parameters[0].device
        norms = torch.zeros(max(self._firsts[-1], 1), dtype=torch.float64, device=device)
        self._exchange.submit(lambda: self._take_own(buckets, factors, norms)).wait()
        self._comm.all_reduce(norms).wait()
        norms = norms.where(torch.tensor(used).repeat_interleave(self._counts).to(device), 0.0)
        pairs = zip(self._parameters, used, strict=True)
        return norm_from_blocks(
            norms, double=any(p.dtype == torch.float64 for p, here in pairs if here)
        )

    def _take_own(self, buckets: Sequence[Bucket], factors: Sequence[Any], norms: Tensor) -> None:
        """Fill in this rank's part of `norms`, on the exchange's thread. The rest of a block that
        ends elsewhere comes from the owners of the next shards: a message each, of less than a
        block, the bucket's dtype."""
        rank = self._comm.rank
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        wholes: list[tuple[Bucket, list[Tensor]]] = []
        places = []
        for bucket in buckets:
            flat = bucket.flat(0)
            for block, pieces in self._pieces_of(bucket):
                owner, parts = pieces[0][0], []
                for holder, start, stop in pieces:
                    part = flat[start:stop]
                    if holder == rank != owner:
                        sends.append((part, owner))
                    elif owner == rank != holder:
                        part = torch.empty_like(part)
                        receives.append((part, holder))
                    parts.append(part)
                if owner == rank:
                    wholes.append((bucket, parts))
                    places.append(self._firsts[block.index] + block.number)
        if sends or receives:
            self._exchange.messenger.exchange(sends, receives).wait()
        if not wholes:
            return
        means = []
        for bucket, parts in wholes:
            mean = torch.cat(parts) if len(parts) > 1 else parts[0]
            if bucket.rounded:
                mean = mean.to(bucket.dtype)
                for factor in factors:
                    foreach_mul_([mean], factor)
            means.append(mean)
        norms[torch.tensor(places, device=norms.device)] = norms_of_blocks(means)

    def _pieces_of(self, bucket: Bucket) -> Pieces:
        """See `pieces_of_rank`; kept as long as ranks' shares of leaves stay the same."""
        known = self._pieces.get(bucket)
        if known is None or known[0] is not self._exchange.stages:
            ranks = range(self._comm.world_size)
            spans = [self._exchange.owned(bucket, rank) for rank in ranks]
            blocks = blocks_of(bucket.plan.slots)
            pieces = pieces_of_rank(blocks, spans, self._comm.rank)
            known = self._pieces[bucket] = (self._exchange.stages, pieces)
        return known[1]


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
        self._why = self._said = self._broken = ""
        self._scaler = False
        self._lock = threading.RLock()
        self._parts: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._norm = ShardedNorm(self.parameters, comm, exchange)
        own = [(m, list(m.parameters(recurse=False))) for m in model.modules()]
        self._modules = [m for m, held in own if any(p.requires_grad for p in held)]

    # -- a step -----------------------------------------------------------------------------------

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """See `Replicas.prepare`; a reason found here lets this rank update at once."""
        self._scaler = scaled
        self._why = next(filter(None, map(_why_at_once, optimizers)), "")

    def take(
        self,
        buckets: Sequence[Bucket],
        used: Sequence[bool],
        factor: float | None,
        watch: Stopwatch,
    ) -> None:
        """See `Replicas.take`; sums that are not whole are asked for here, of all owners."""
        if self._exchange.whole:
            super().take(buckets, used, factor, watch)
            return
        for parameter in self.parameters:
            parameter.grad = None
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
        step = self._step
        if step is None:
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
        step = self._step
        if step is None:
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
            groups = [
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in options(g).items()}
                for g in optimizer.param_groups
            ]
            used = {id(p) for p, here in zip(self.parameters, step.used, strict=True) if here}
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                if id(parameter) in used:  # entries in the order in which the optimizer makes them
                    own_state(optimizer.state).setdefault(parameter, {})
            parts = self._parts_of(optimizer, step.buckets)
            step.updates.append(_Update(optimizer, own_state(optimizer.state), groups, parts))

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
        step = self._step
        if step is None:
            return Done()
        for update in step.updates:
            if "step" in update.optimizer.__dict__:  # a scheduler wraps it, to count
                update.optimizer.step()  # without gradients it changes nothing
        if not all(map(can_be_marked, self.parameters)):
            self.wait()
            return Done()
        for number, bucket in enumerate(step.buckets):
            mark(bucket.parameters, lambda number=number: self._arrive(number))
        for update in step.updates:
            vars(update.optimizer)["state"] = WaitingState(update.state, self.wait)
        self._hooks = [m.register_forward_pre_hook(_wait_for_own) for m in self._modules]
        return Done()

    def wait(self) -> None:
        """See `Replicas.wait`."""
        with self._lock:
            step = self._step
            if step is None or not step.updates:
                return
            for number in reversed(range(len(step.buckets))):
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of bucket `number`, once its sums are there, whatever mode the code
        that touched them runs in: state that is made in inference mode could not be changed."""
        kind = self.parameters[0].device.type
        modes = (torch.no_grad(), torch.inference_mode(False), torch.autocast(kind, enabled=False))
        with self._lock, modes[0], modes[1], modes[2]:
            if self._broken:
                raise RunError(f"{self._broken}: go back to a checkpoint")
            step = self._step
            if step is None or step.gathers[number] is _DONE:
                return
            step.gathers[number].wait()
            self._broken = f"the update of weights was interrupted at bucket {number}"
            step.gathers[number] = _DONE
            bucket, used = self._with_used()[number]
            unmark(bucket.parameters)
            means = {
                id(p): mean if here else None
                for p, mean, here in zip(bucket.parameters, self._means(bucket), used, strict=True)
            }
            with self.updates(bucket.parameters):
                for update in step.updates:
                    part = update.parts[number]
                    if part.inner is not None:
                        part.inner.state = update.state
                        ours = [p for group in part.inner.param_groups for p in group["params"]]
                        part.step(update.groups, [(p, means[id(p)]) for p in ours])
            self._broken = ""
            if all(work is _DONE for work in step.gathers):
                self._step = None
                for update in step.updates:
                    update.optimizer.state = own_state(update.optimizer.state)
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []

    def close(self) -> None:
        self.wait()


_DONE = Done()


def _wait_for_own(module: nn.Module, _: Any) -> None:
    for parameter in module.parameters(recurse=False):
        wait_for(parameter)


def _why_at_once(optimizer: Optimizer) -> str:
    """Reason why the update cannot wait until weights are used, "" if it can."""
    if has_compiled():
        return "compiled code reads weights past the functions that would wait"
    try:
        check_elementwise(type(optimizer), False)
    except ConfigError as error:
        return str(error)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return why_not_now(optimizer)
