"""Bytes of gradients, optimizer state and buffers under each strategy, at each moment of a step.

S = 4 x parameters of the rank (gradients are fp32), W replicas, k leaves of a rank, b the largest
bucket (bytes). AdamW keeps two fp32 moments: 2 S (Kingma & Ba 2014, arXiv 1412.6980); Rajbhandari
et al. 2020 (ZeRO, arXiv 1910.02054, section 3.1) count the same 16 bytes a parameter with weights
and gradients, and divide them by W stage by stage.

Moments of a rank's last leaf, of which one is the fullest:

    loss      forward is over, nothing of this leaf's gradient is there
    backward  all gradients are there, nothing of the leaf but the embedding's own gradient
    update    activations are gone; optimizer, gathers, meetings
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from gradsync.data.plan import share
from gradsync.plan.memory.activations import FP32, RankShape
from gradsync.plan.workload import Split, Workload
from gradsync.sync.layout import Item, plan_buckets
from gradsync.sync.leaf_tree import LeafStack
from gradsync.sync.options import Recipe
from gradsync.sync.registry import find_strategy

MIB = 2**20
_IN_FLIGHT = 3
"""Buckets of parameters that `sharded/optimizer.py` has in memory: one updated, two under way."""


class Moment(NamedTuple):
    """Bytes that a strategy has in memory at one moment, beside weights and optimizer state."""

    gradients: int
    """In `.grad`, or in the shard of it that this rank keeps."""
    buckets: int = 0
    """Beside them, for communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyMemory:
    """Bytes of one rank under one strategy."""

    weights: int
    """All the time; a rank's share of one copy per host. Likewise `optimizer`."""
    optimizer: int
    loss: Moment
    """See the module's list for this one and the next two."""
    backward: Moment
    update: Moment
    fresh: int
    """Gradients of the embedding that backward has just made, beside `backward`."""
    gathered_block: int = 0
    """fsdp: the weights and gradients that a block brings with it while it computes."""
    gathered_blocks: int = 0
    """Bytes of all blocks that are gathered so."""
    renewed: int = 0
    """Made anew by each step for communication, and let go."""
    moved: int = 0
    """Bytes that lay in the process's own memory before it moved into shared memory (CPU)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A rank's share of a step under one strategy."""

    work: Workload
    split: Split
    shape: RankShape
    """The rank's part."""

    @property
    def gradient_bytes(self) -> int:
        """S."""
        return FP32 * self.shape.num_params

    @property
    def replicas(self) -> int:
        """W."""
        return self.split.layout.dp

    @property
    def leaves(self) -> int:
        """k, of the rank with most."""
        return -(-self.work.num_leaves // self.replicas)

    @property
    def added_up(self) -> int:
        """Gradients of leaves before the last one."""
        return self.gradient_bytes if self.leaves > 1 else 0

    @property
    def fresh(self) -> int:
        """The embedding's gradient, the last that backward makes. A tied one comes twice: the
        head's waits in autograd until it can be added."""
        if not self.shape.has_embedding:
            return 0
        return FP32 * self.shape.table_params * (2 if self.shape.is_tied else 1)

    def shard(self, num_bytes: int) -> int:
        """A rank's share of something that the replicas divide."""
        return -(-num_bytes // self.replicas)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each, by the recipe's own sizes; DDP's are like them."""
        recipe = Recipe()
        items = [Item(numel=size, itemsize=FP32, kind=None) for size in self.shape.sizes]
        plans = plan_buckets(
            items,
            list(reversed(range(len(items)))),
            bucket_bytes=recipe.bucket_mb * MIB,
            first_bucket_bytes=recipe.first_bucket_mb * MIB,
            world_size=self.replicas,
        )
        return tuple(FP32 * plan.numel for plan in plans)

    @property
    def largest_bucket(self) -> int:
        """b."""
        return max(self.buckets)

    @property
    def tree_buffers(self) -> int:
        """Gradient buffers that the fixed tree keeps at once, on the rank that needs most."""
        return most_open_nodes(self.work.num_leaves, self.replicas)


@cache
def most_open_nodes(num_leaves: int, world_size: int) -> int:
    """Largest number of the tree's nodes that a rank holds at once; see `leaf_tree.py`."""
    most = 1
    for rank in range(world_size if num_leaves > world_size else 0):
        stack = LeafStack()
        for leaf in share(num_leaves, rank, world_size):
            stack.push(leaf)
            most = max(most, len(stack.nodes))
    return most


def strategy_memory(case: Case) -> StrategyMemory:
    """The memory of the strategy of `case`.

    Raises:
        ConfigError: an unknown strategy.
    """
    strategy = find_strategy(case.split.strategy)
    # One replica has nobody to talk to; see `registry.build_reducer`.
    name = "naive" if strategy.needs_group and case.replicas == 1 else strategy.name
    return FORMULAS[name](case)


def _memory(
    case: Case, loss: Moment, backward: Moment, update: Moment, **other: int
) -> StrategyMemory:
    """Weights and state whole on every rank, where `other` does not say otherwise."""
    size = case.gradient_bytes
    whole = {"weights": size, "optimizer": 2 * size, "fresh": case.fresh}
    return StrategyMemory(loss=loss, backward=backward, update=update, **whole | other)


def _naive(case: Case) -> StrategyMemory:
    """`.grad` is made by backward and dropped by the update."""
    return _memory(case, Moment(case.added_up), _made(case), Moment(case.gradient_bytes))


def _made(case: Case, buckets: int = 0) -> Moment:
    """When backward ends, where what it makes becomes `.grad`: of the first leaf the embedding's
    is not there yet."""
    waits = FP32 * case.shape.table_params if case.fresh and case.leaves == 1 else 0
    return Moment(case.gradient_bytes - waits, buckets)


def _engine(case: Case, *, buffers: int = 1, passing: int = 0, **other: int) -> StrategyMemory:
    """Flat buffers that stay from step to step; `.grad` is a view of the first.

    Args:
        case: what is trained.
        buffers: of each bucket.
        passing: bytes on the way while backward ends.
        other: as `_memory`.
    """
    size = case.gradient_bytes
    held = Moment(size, (buffers - 1) * size)
    moving = held._replace(buckets=held.buckets + passing)
    return _memory(case, held, moving, held, renewed=passing, **other)


def _bucketed(case: Case) -> StrategyMemory:
    return _on_host(case, 1) if case.split.shared_weights else _engine(case)


def _invariant(case: Case) -> StrategyMemory:
    buffers = case.tree_buffers
    if case.split.shared_weights:
        return _on_host(case, buffers)
    return _engine(case, buffers=buffers, passing=_slices(case, buffers))


def _on_host(case: Case, buffers: int) -> StrategyMemory:
    """One copy of weights and state for all ranks of the host: a rank's share of them. Gradients
    lie in shared memory too, and each rank has buffers of its own."""
    size = case.gradient_bytes
    shares = {"weights": case.shard(size), "optimizer": case.shard(2 * size)}
    # Moved: the weights, and each buffer but the first.
    return _engine(case, buffers=buffers, moved=buffers * size, **shares)


def _slices(case: Case, buffers: int) -> int:
    """Slices that arrive for the tree's sums: the own part of a bucket, from each node of each
    rank. Ranks of one host on CPUs read them where they are."""
    if case.work.kind == "cpu":
        return 0
    return buffers * (case.replicas - 1) * case.shard(case.largest_bucket)


def _ring(case: Case) -> StrategyMemory:
    return _engine(case, passing=case.shard(case.largest_bucket))


def _bf16(case: Case) -> StrategyMemory:
    """Every bucket's 16-bit copy is there when backward ends."""
    return _engine(case, passing=case.gradient_bytes // 2)


def _fp16(case: Case) -> StrategyMemory:
    """And two fp32 copies of a bucket while it is scaled back."""
    size, bf16 = case.gradient_bytes, _bf16(case)
    back = Moment(size, size // 2 + 2 * case.largest_bucket)
    return replace(bf16, update=back, renewed=bf16.renewed + size)


def _ddp(case: Case) -> StrategyMemory:
    """Buckets stay; `.grad` is a view of them. Leaves before the last add up in memory of their
    own, as torch lets go of the views when gradients are cleared (arXiv 2006.15704)."""
    held = Moment(case.added_up, case.gradient_bytes)
    return _memory(case, held, held, held._replace(gradients=0))


def _powersgd(case: Case) -> StrategyMemory:
    """`ddp`, the error (S) and a copy of the bucket at hand (arXiv 1905.13727)."""
    size = case.gradient_bytes
    held = Moment(case.added_up, 2 * size)
    moving = held._replace(buckets=2 * size + case.largest_bucket)
    return _memory(case, held, moving, moving._replace(gradients=0), renewed=size)


def _local_sgd(case: Case) -> StrategyMemory:
    """`naive` alone; a flat copy of the weights while ranks meet, gradients gone."""
    size = case.gradient_bytes
    return replace(_naive(case), update=Moment(0, size), renewed=size)


def _diloco(case: Case) -> StrategyMemory:
    """The round's start and the outer momentum; while ranks meet the distances and their mean."""
    size = case.gradient_bytes
    loss = Moment(case.added_up, 2 * size)
    return _memory(case, loss, _made(case, 2 * size), Moment(0, 4 * size), renewed=2 * size)


def _gathering(case: Case) -> int:
    """Updated parameters on their way to the other ranks: bucket and own shard."""
    buckets = case.buckets
    together = max(sum(buckets[n : n + _IN_FLIGHT]) for n in range(len(buckets)))
    return together + case.shard(together)


def _zero1(case: Case) -> StrategyMemory:
    """The optimizer's state divided; gradients whole, in the tree's buffers."""
    size, buffers = case.gradient_bytes, case.tree_buffers
    others = (buffers - 1) * size
    return _memory(
        case,
        Moment(size, others),
        Moment(size, others + _slices(case, buffers)),
        Moment(size, others + _gathering(case)),
        optimizer=case.shard(2 * size),
        renewed=size + case.shard(size),
    )


def _zero2(case: Case) -> StrategyMemory:
    """Buckets whole until backward ends, then the own shard of each. When the last gradient is
    made, all buckets but its own are on their way, each into a shard."""
    size = case.gradient_bytes
    return _memory(
        case,
        Moment(case.added_up),
        Moment(size, case.shard(sum(case.buckets[:-1]))),
        Moment(case.shard(size), _gathering(case)),
        optimizer=case.shard(2 * size),
        renewed=2 * (size + case.shard(size)),
    )


def _fsdp(case: Case) -> StrategyMemory:
    """Everything in shards; what is outside of the blocks is gathered for the whole step, a block
    while it computes. Leaves before the last keep whole gradients (arXiv 2304.11277)."""
    size = case.gradient_bytes
    root, block = FP32 * case.shape.root_params, FP32 * case.shape.block_params
    shard = case.shard(size)
    return _memory(
        case,
        Moment(case.added_up, root),
        # The blocks' gradients are in shards by now, those of leaves before the last as well.
        # Outside of the blocks: weights, gradients, and these once more as they are sent.
        Moment(shard, 3 * root),
        Moment(shard),
        weights=shard,
        optimizer=case.shard(2 * size),
        fresh=0,
        gathered_block=2 * block,
        gathered_blocks=case.shape.blocks * block,
    )


FORMULAS: dict[str, Callable[[Case], StrategyMemory]] = {
    "naive": _naive,
    "flat": _engine,
    "overlap": _engine,
    "bucketed": _bucketed,
    "invariant": _invariant,
    "ring": _ring,
    "hierarchical": _ring,
    "bf16": _bf16,
    "fp16": _fp16,
    "zero1": _zero1,
    "zero2": _zero2,
    "fsdp": _fsdp,
    "ddp": _ddp,
    "powersgd": _powersgd,
    "local_sgd": _local_sgd,
    "diloco": _diloco,
}
