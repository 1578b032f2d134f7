"""`zero1` and `zero2`: the engine, with an optimizer whose state is divided among the ranks.

    zero1   backward ─ sums of whole buckets ─► update own shard ─► all_gather parameters
    zero2   backward ─ reduce_scatter buckets ► update own shard ─► all_gather parameters

Rajbhandari et al. 2020, arXiv 1910.02054, stages 1 and 2. The optimizer remains the user's object:
its hyper-parameters are read at each step, its state lives here, in pieces. Buckets keep the order
of their first layout, since pieces belong to places in buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.core.torch_private import foreach_mul_
from gradsync.errors import ConfigError
from gradsync.sync.clip import gradient_norm
from gradsync.sync.engine.engine import Engine
from gradsync.sync.sharded.bucket import members_of
from gradsync.sync.sharded.elementwise import check_elementwise
from gradsync.sync.sharded.layout import Layout
from gradsync.sync.sharded.optimizer import ShardedOptimizer, step_together
from gradsync.sync.sharded.shares import HeldState

if TYPE_CHECKING:
    from torch import Tensor


class ShardedEngine(Engine):
    """`Engine` for recipes that shard; its arguments are the engine's.

    In the user's training loop `optimizer.step()` would be the whole optimizer's: use another
    strategy there, and `ShardedOptimizer` in place of the optimizer.
    """

    own_loop = False
    takes_scale = False  # a GradScaler looks for inf in whole gradients

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sharded: dict[int, ShardedOptimizer] = {}  # by the id of the user's optimizer
        self._members: dict[int, list[list[int]]] = {}
        self._in_shards = self.recipe.shard == "gradients"
        self._shards: list[Tensor] = []
        self._used: list[bool] = []

    def publish(self, used: list[bool]) -> None:
        """Keep gradients that are in shards, and free the buckets; whole `.grad`s do not exist."""
        if not self._in_shards:
            super().publish(used)
            return
        self._used, self._shards = used, []
        for bucket in self.buckets:
            for place, slot in enumerate(bucket.plan.slots):
                if not used[slot.index]:
                    bucket.view(0, place).zero_()  # no optimizer holds it
            mine = bucket.plan.shard(self.comm.rank, self.comm.world_size)
            self._shards.append(bucket.flat(0)[mine.start : mine.stop].clone())
            bucket.free()
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """See `Reducer.gradients`; parts of parameters that no rank used are zeros."""
        return self._shards if self._in_shards else super().gradients()

    def whole_gradients(self) -> list[Tensor | None]:
        """Mean gradients of the parameters in their order, whole, None where no rank had one.

        All ranks call it, between the synchronisation and the update. From shards: one all-gather
        per bucket, whole group, its [numel] and dtype; overlaps nothing.
        """
        if not self._in_shards:
            return [parameter.grad for parameter in self.parameters]
        found: list[Tensor | None] = [None] * len(self.parameters)
        for bucket, shard in zip(self.buckets, self._shards, strict=True):
            flat = torch.empty(bucket.plan.numel, dtype=shard.dtype, device=shard.device)
            self.comm.all_gather(flat, shard).wait()
            for slot in bucket.plan.slots:
                if self._used[slot.index]:
                    part = flat[slot.offset : slot.offset + slot.numel]
                    found[slot.index] = part.view(self.parameters[slot.index].shape)
        return found

    def clip(self, max_norm: float) -> Tensor:
        """See `Reducer.clip`; from shards the norm's last bits depend on where they are cut."""
        if not self._in_shards:
            return super().clip(max_norm)
        square = gradient_norm(self._shards).double().square()
        # Whole group, float64 []; overlaps nothing: the factor depends on it.
        self.comm.all_reduce(square).wait()
        norm = square.sqrt().float()
        foreach_mul_(self._shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def expect(self, optimizers: Sequence[torch.optim.Optimizer], *, scaled: bool) -> None:
        """See `Reducer.expect`.

        Raises:
            ConfigError: an optimizer whose state cannot be divided among ranks.
        """
        for optimizer in optimizers:
            try:
                check_elementwise(type(optimizer), False)
            except ConfigError as error:
                raise ConfigError(
                    f"sync={self.strategy!r} shares optimizers' state out element by element: "
                    f"{error}. Use sync='invariant' or another strategy that keeps it whole"
                ) from None

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Update this rank's shards and gather all ranks'."""
        sharded = [self._of(optimizer) for optimizer in optimizers]
        step_together(sharded, self._shards if self._in_shards else None, self._used)
        self._shards = []

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Reducer.gather`."""
        self._of(optimizer).gather_into(optimizer)

    def scatter(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Reducer.scatter`."""
        known = id(optimizer) in self._sharded
        sharded = self._of(optimizer)  # a new one has taken the state already
        if known:
            sharded.take_from(optimizer)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> HeldState:
        """See `Reducer.sharded_state_dict`."""
        return self._of(optimizer).held()

    def load_sharded_state_dict(
        self, optimizer: torch.optim.Optimizer, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """See `Reducer.load_sharded_state_dict`."""
        self._of(optimizer).keep(states)

    def _of(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """The sharded counterpart of the user's optimizer, made at first sight, and again when its
        groups hold other parameters (`add_param_group`); all ranks call it together."""
        members = members_of(optimizer)
        known = self._sharded.get(id(optimizer))
        if known is None or self._members[id(optimizer)] != members:
            if known is not None:
                known.gather_into(optimizer)
            plan = Layout(self.parameters, [bucket.plan for bucket in self.buckets])
            known = ShardedOptimizer.like(optimizer, comm=self.comm, plan=plan)
            self._sharded[id(optimizer)], self._members[id(optimizer)] = known, members
        return known
