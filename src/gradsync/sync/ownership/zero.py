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
from weakref import WeakKeyDictionary

import torch
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import AllOf, Then
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
from gradsync.sync.ownership.elementwise import why_not_elementwise
from gradsync.sync.ownership.sharded_optimizer import (
    ShardedUpdate,
    gradient_of_piece,
    update_and_gather,
    wait_for_most,
)
from gradsync.sync.replicas import (
    Replicas,
    WaitingWeights,
    clip_factor,
    clip_shards,
    owned_update,
    scale_all,
    tell,
)
from gradsync.sync.shares import HeldState
from gradsync.sync.tree_exchange import ShardedNorm, TreeExchange
from gradsync.sync.watch import postponed, why_not_now

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradsync.sync.layout import Piece


class ZeroShards(Replicas):
    """Optimizer state in shards, one per rank.

    Args:
        model, comm: see `Replicas`.
        buckets: of the gradients; each is divided into one shard per rank.
        gradients: keep only this rank's shard of the gradients too (stage 2).
        exchange: sums shards, each at its owner; None: buckets hold whole sums or scattered sums.
        late: leave the gathers to the next forward; a weight waits for its gather when it is used.
    """

    takes_scaler = False  # a GradScaler looks for inf in whole gradients

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        buckets: Sequence[Bucket],
        *,
        gradients: bool,
        exchange: TreeExchange | None,
        late: bool,
    ) -> None:
        super().__init__(model, comm)
        self.waiting = WaitingWeights(model) if late else None
        self._updates: WeakKeyDictionary[Optimizer, tuple[Any, ShardedUpdate]] = WeakKeyDictionary()
        self._stepped: Sequence[Optimizer] = ()
        """Optimizers whose update is not published yet."""
        self._buckets, self._scattered = list(buckets), gradients
        self.by_halves = exchange is not None
        self._in_shards = gradients or self.by_halves
        self._owners = comm if exchange is None else exchange.owners()
        self._norm = None if exchange is None else ShardedNorm(self.parameters, comm, exchange)
        self._settles = exchange is not None and exchange.in_one_order
        self._shards: list[Tensor] = []
        self._used: Sequence[bool] = ()
        self._gathers: list[Then] = []
        """Buckets of new weights on their way to this rank."""

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        for optimizer in optimizers:
            if reason := why_not_elementwise(type(optimizer)):
                raise ConfigError(
                    f"strategy={self.strategy!r} shares optimizers' state out element by element: "
                    f"{reason}. Use strategy='invariant' or another strategy that keeps it whole"
                )
            if reason := why_not_now(optimizer, after=False):
                raise ConfigError(
                    f"strategy={self.strategy!r} updates shards, in which no rank has whole "
                    f"gradients: {reason}. Use strategy='invariant', or a hook that is called "
                    "after the step"
                )

    def take(self, buckets: Sequence[Bucket], used: Sequence[bool], factor: float | None) -> None:
        """See `Replicas.take`; keeps the shards, and in stage 2 frees the buckets."""
        if not self._in_shards:
            super().take(buckets, used, factor)
            return
        self.exposed.stop()
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
        """See `Replicas.whole_gradients`. From shards: one all-gather per bucket, whole group, with
        its [numel] and dtype (down the tree under zero1); overlaps nothing."""
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
        return clip_shards(self._shards, max_norm, self.comm, self._shards[0].device)

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this rank's shards, and start gathering all shards."""
        pairs = [(optimizer, self._update_of(optimizer)) for optimizer in optimizers]
        for optimizer, update in pairs:
            update.take_in(optimizer)
        if self.waiting is None:
            self._gathers = wait_for_most(update_and_gather(pairs, self._gradient_of))
        else:
            launched = update_and_gather(pairs, self._gradient_of, last_first=True)
            self._gathers = list(launched)[::-1]
        self.under_way = [gather.work for gather in self._gathers if self._settles]
        self._shards, self._stepped = [], optimizers

    def _gradient_of(self, bucket: int, parameter: Tensor, piece: Piece) -> Tensor | None:
        if self._in_shards:
            mine = self._shards[bucket][piece.offset : piece.offset + piece.numel]
            return mine if self._used[piece.index] else None
        return gradient_of_piece(bucket, parameter, piece)

    def publish(self) -> Work:
        """See `Replicas.publish`: this step's last gathers, or nothing if weights wait."""
        gathers, self._gathers, self.under_way = self._gathers, [], ()
        stepped, self._stepped = self._stepped, ()
        if self.waiting is not None and gathers:
            late, gathers = dict(enumerate(gathers)), []
            buckets = [b.parameters for b in self._buckets]

            def copy_in(number: int) -> None:
                with record_function(f"update {number}"), postponed(buckets[number]):
                    late.pop(number).wait()  # and releases the gathered copy

            sent = [gather.work for gather in late.values()]
            self.waiting.expect(buckets, sent, copy_in)
        # After the marks, so that an optimizer hook that reads weights waits. It may raise.
        return Then(AllOf(gathers), lambda: [tell(optimizer) for optimizer in stepped])

    def _update_of(self, optimizer: Optimizer) -> ShardedUpdate:
        return owned_update(self._updates, optimizer, self._divide)

    def _divide(self, optimizer: Optimizer) -> ShardedUpdate:
        plans = [bucket.plan for bucket in self._buckets]
        update = ShardedUpdate(
            *(optimizer, type(optimizer), self.parameters, plans),
            comm=self.comm,
            owners=self._owners,
        )
        refuse = partial(_refuse_empty_state, weakref.ref(update), self.strategy)
        optimizer.register_state_dict_pre_hook(refuse)
        return update

    def gather(self, optimizer: Optimizer) -> None:
        self.wait()
        self._update_of(optimizer).give_back(optimizer)

    def scatter(
        self, optimizer: Optimizer, states: Mapping[Any, dict[str, Any]] | None = None
    ) -> None:
        update = self._update_of(optimizer)
        if states is None:
            update.take_in(optimizer)
        else:
            update.keep(states)

    def sharded_state_dict(self, optimizer: Optimizer) -> HeldState:
        return self._update_of(optimizer).held()


def _refuse_empty_state(
    known: weakref.ref[ShardedUpdate], strategy: str, optimizer: Optimizer
) -> None:
    """Hook before `optimizer.state_dict()`, which would silently omit the state."""
    update = known()
    if update is None or any(optimizer.state.values()) or not update.state_bytes:
        return
    raise ConfigError(
        f"strategy={strategy!r}: the optimizer's state is divided among the ranks, and its "
        "state_dict() would hold none of it: sync.state_dict(optimizer) holds all of it, if all "
        "ranks call it"
    )
