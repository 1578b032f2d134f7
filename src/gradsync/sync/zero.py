"""ZeRO shards. Each rank keeps and updates its part of the optimizer's state (zero1), and also of
the summed gradients (zero2).

    zero1   backward ─ sums to their owners ──► update own shard ─► parameters to all ranks
    zero2   backward ─ reduce_scatter buckets ► update own shard ─► all_gather parameters

Under zero1 these are the two halves of the sum along the tree (tree_exchange.py), with the update
between them: the bytes of one all-reduce. If ranks share memory, or another recipe sums, the sums
are whole on each rank, and parameters are gathered in addition.

Rajbhandari et al. 2020, arXiv 1910.02054, stages 1 and 2. The optimizer remains the user's object:
its hyper-parameters are read at each step, and its state is kept here, in pieces. Buckets keep the
order of their first layout, because pieces belong to places in buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Done
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
from gradsync.sync.elementwise import check_elementwise, members_of
from gradsync.sync.exchange import Then
from gradsync.sync.monitors import Stopwatch
from gradsync.sync.replicas import Replicas, clip_factor, clip_shards, scale_all
from gradsync.sync.sharded_optimizer import (
    ShardedOptimizer,
    ShardLayout,
    step_together,
    tell_sources,
    update_and_gather,
)
from gradsync.sync.sharded_state import HeldState
from gradsync.sync.tree_exchange import ShardedNorm, TreeExchange
from gradsync.sync.waiting_weights import WaitingWeights, has_compiled
from gradsync.sync.watch import postponed, why_not_now

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class ZeroShards(Replicas):
    """Optimizer state in shards, one per rank.

    Args:
        model, parameters: see `Replicas`.
        comm: all ranks.
        buckets: of the gradients; each bucket is divided into one shard per rank.
        gradients: keep only this rank's shard of the gradients too (stage 2).
        exchange: sums shards, each at its owner; None: buckets hold whole sums or scattered sums.
        late: leave the gathers to the next forward; a weight waits for its gather when it is used.
    """

    takes_scaler = False  # a GradScaler looks for inf in whole gradients

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        buckets: Sequence[Bucket],
        *,
        gradients: bool,
        exchange: TreeExchange | None,
        late: bool,
    ) -> None:
        super().__init__(model, parameters)
        self._weights = WaitingWeights(model) if late else None
        self._comm, self._buckets, self._scattered = comm, list(buckets), gradients
        self.by_halves = exchange is not None
        self._in_shards = gradients or self.by_halves
        self._owners = comm if exchange is None else exchange.owners()
        self._norm = None if exchange is None else ShardedNorm(self.parameters, comm, exchange)
        self._settles = exchange is not None and exchange.in_one_order
        self._sharded: dict[int, ShardedOptimizer] = {}  # keys are ids of the users' optimizers
        self._members: dict[int, list[list[int]]] = {}
        self._states: dict[int, Any] = {}  # state of the users' optimizers, empty between steps
        self._shards: list[Tensor] = []
        self._used: Sequence[bool] = ()
        self._gathers: Work = Done()
        self._late: list[Then] = []

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        for optimizer in optimizers:
            try:
                check_elementwise(type(optimizer), False)
            except ConfigError as error:
                raise ConfigError(
                    f"strategy={self.strategy!r} shares optimizers' state out element by element: "
                    f"{error}. Use strategy='invariant' or another strategy that keeps it whole"
                ) from None
            if reason := why_not_now(optimizer, after=False):
                raise ConfigError(
                    f"strategy={self.strategy!r} updates shards, in which no rank has whole "
                    f"gradients: {reason}. Use strategy='invariant', or a hook that is called "
                    "after the step"
                )

    def take(
        self,
        buckets: Sequence[Bucket],
        used: Sequence[bool],
        factor: float | None,
        watch: Stopwatch,
    ) -> None:
        """See `Replicas.take`; keeps the shards, and in stage 2 frees the buckets."""
        if not self._in_shards:
            super().take(buckets, used, factor, watch)
            return
        watch.stop()
        self._used, self._shards = used, []
        for bucket in buckets:
            for place, slot in enumerate(bucket.plan.slots):
                if not used[slot.index]:
                    bucket.view(0, place).zero_()  # no optimizer holds it
            mine = bucket.plan.shard(self._owners.rank, self._owners.world_size)
            own = bucket.flat(0)[mine.start : mine.stop]
            self._shards.append(own.to(bucket.dtype, copy=self._scattered))
            if self._scattered:
                bucket.free()
        for parameter in self.parameters:
            parameter.grad = None
        self.scale(factor)

    def owned(self) -> list[Tensor]:
        """See `Replicas.owned`; parts of parameters that no rank used are zeros."""
        return self._shards if self._in_shards else super().owned()

    def whole_gradients(self) -> list[Tensor | None]:
        """See `Replicas.whole_gradients`.

        From shards: one all-gather per bucket, whole group, with its [numel] and dtype (down the
        tree under zero1); overlaps nothing.
        """
        if not self._in_shards:
            return super().whole_gradients()
        found: list[Tensor | None] = [None] * len(self.parameters)
        for bucket, shard in zip(self._buckets, self._shards, strict=True):
            flat = torch.empty(bucket.plan.numel, dtype=shard.dtype, device=shard.device)
            self._owners.all_gather(flat, shard).wait()
            for slot in bucket.plan.slots:
                if self._used[slot.index]:
                    part = flat[slot.offset : slot.offset + slot.numel]
                    found[slot.index] = part.view(self.parameters[slot.index].shape)
        return found

    def clip(self, max_norm: float) -> Tensor:
        if self._norm is not None:
            norm = self._norm.of(self._buckets, self._shards, self._used)
            scale_all(self._shards, clip_factor(norm, max_norm))
            return norm
        if not self._in_shards:
            return super().clip(max_norm)
        return clip_shards(self._shards, max_norm, self._comm, self._shards[0].device)

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this rank's shards, and start gathering all shards; first divides loaded state."""
        sharded = [self._of(optimizer) for optimizer in optimizers]
        for optimizer, its in zip(optimizers, sharded, strict=True):
            before = self._states.get(id(optimizer), optimizer.state)
            if before is not optimizer.state or any(optimizer.state.values()):
                its.take_from(optimizer)
            self._states[id(optimizer)] = optimizer.state
            if not self._scattered:
                its.check()
        shards = self._shards if self._in_shards else None
        if self._weights is None:
            self._gathers = step_together(sharded, shards, self._used)
        else:
            launched = update_and_gather(sharded, shards, self._used, last_first=True)
            self._late = list(launched)[::-1]
            self._gathers = Then(Done(), partial(tell_sources, sharded))
        self._shards = []

    def settle(self) -> None:
        """See `Replicas.settle`: waits for all gathers."""
        for gather in (self._late or [self._gathers]) if self._settles else ():
            (gather.work if isinstance(gather, Then) else gather).wait()

    def publish(self) -> Work:
        """See `Replicas.publish`: this step's last gathers, or nothing if weights wait."""
        told, self._gathers = self._gathers, Done()
        if self._weights is not None and self._late:
            late, self._late = dict(enumerate(self._late)), []
            buckets = [b.parameters for b in self._buckets]

            def copy_in(number: int) -> None:
                with record_function(f"update {number}"), postponed(buckets[number]):
                    late.pop(number).wait()  # and releases the gathered copy

            sent = [gather.work for gather in late.values()]
            self._weights.expect(buckets, sent, copy_in, late=not has_compiled())
        return told  # after the marks, so that an optimizer hook that reads weights waits

    def wait(self) -> None:
        """See `Replicas.wait`."""
        if self._weights is not None:
            self._weights.wait()

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()

    def gather(self, optimizer: Optimizer) -> None:
        self._of(optimizer).gather_into(optimizer)

    def scatter(self, optimizer: Optimizer) -> None:
        known = id(optimizer) in self._sharded
        sharded = self._of(optimizer)  # a new one has taken the state already
        if known:
            sharded.take_from(optimizer)

    def sharded_state_dict(self, optimizer: Optimizer) -> HeldState:
        return self._of(optimizer).held()

    def load_sharded_state_dict(
        self, optimizer: Optimizer, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        self._of(optimizer).keep(states)

    def held_bytes(self, optimizer: Optimizer) -> int:
        """Bytes of the optimizer's state that this rank holds a part of."""
        its = self._sharded.get(id(optimizer))
        return 0 if its is None else its.state_bytes

    def _of(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded counterpart of `optimizer`, made at first use, and again when its groups hold
        other parameters (`add_param_group`); all ranks call it together."""
        members = members_of(optimizer)
        known = self._sharded.get(id(optimizer))
        if known is None or self._members[id(optimizer)] != members:
            if known is not None:
                known.gather_into(optimizer)
            plans = [bucket.plan for bucket in self._buckets]
            plan = ShardLayout(self.parameters, plans, self._owners)
            new = ShardedOptimizer.like(optimizer, comm=self._comm, plan=plan)
            self._sharded[id(optimizer)], self._members[id(optimizer)] = new, members
            if known is None:
                refuse = partial(_refuse_empty_state, weakref.ref(self))
                optimizer.register_state_dict_pre_hook(refuse)
            known = new
        return known


def _refuse_empty_state(owner: weakref.ref[ZeroShards], optimizer: Optimizer) -> None:
    """Hook before `optimizer.state_dict()`, which would silently omit the state."""
    shards = owner()
    if shards is None or any(optimizer.state.values()) or not shards.held_bytes(optimizer):
        return
    raise ConfigError(
        f"strategy={shards.strategy!r}: the optimizer's state is divided among the ranks, and its "
        "state_dict() would hold none of it: call sync.gather(optimizer) on all ranks before it, "
        "and sync.scatter(optimizer) after it"
    )
