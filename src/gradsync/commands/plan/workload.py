"""The run to plan, how it is divided over ranks, and what a strategy sends; pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.description import Kind
from gradsync.sync.options import Grouping, Recipe
from gradsync.sync.registry import find_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training run, independent of ranks."""

    model: GPTConfig
    micro_batch_size: int  # Sequences of a leaf
    seq_len: int
    num_leaves: int  # Leaves of an optimizer step, over all ranks
    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"  # bf16 and fp16 are autocast over fp32 weights
    activation_checkpointing: bool = False
    kind: Kind = "cuda"

    @property
    def leaf_tokens(self) -> int:
        """Tokens of one leaf."""
        return self.micro_batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.leaf_tokens * self.num_leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One way to divide a run over ranks."""

    strategy: str  # A name in `sync.registry.STRATEGIES`: how replicas synchronise
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    shared_weights: bool = False  # One copy of weights and state for all ranks of a host (CPU)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.layout.world_size

    @property
    def sizes(self) -> str:
        """Such as `dp=2,tp=2`: replicas, stages and shards, if above 1."""
        return sizes_text(self.layout, ("dp", "pp", "tp"))

    def __str__(self) -> str:
        return f"{self.strategy} {self.sizes}".rstrip()


def sizes_text(layout: ParallelLayout, names: Sequence[str] = ("pp", "tp", "dp")) -> str:
    """The sizes above 1, as `gradsync train --parallel` takes them."""
    sizes = {name: getattr(layout, name) for name in names}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def goes_with_parts(sync: str) -> bool:
    """Whether a strategy sums whole replicas of a model's part; see `parallel/split_sync.py`."""
    recipe = find_strategy(sync).recipe
    if recipe is None:
        return sync == "naive"
    return recipe.shard == "none" and recipe.reduction != "hierarchical"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of one strategy.

    in backward        all_reduce or reduce_scatter of each bucket, during backward or after it
    after update       all_gather of the weights, if each rank updated a share
    per micro-batch    gathers before each block computes (fsdp)
    periodic           an all_reduce of the weights every `every` steps (local_sgd, diloco)
    """

    grouping: Grouping = "buckets"  # Which gradients travel together
    bucket_mb: float = 25.0
    overlap: bool = True  # Communicate during backward, where other hardware does it
    late: bool = False
    """Whether one half of an all-reduce overlaps with backward, the other with the next forward
    (sync/late_update.py); on CPUs only, except along the tree. With shards: whether updated weights
    are gathered there."""
    shard: Literal["none", "optimizer", "gradients", "weights"] = "none"
    """How far ranks shard. optimizer: each updates its part. gradients: they are scattered, too.
    weights: they are gathered in each forward and backward, which reduces gradients, too."""
    algorithm: str = "best"  # A name in `step_costs.ALL_REDUCE`, or best
    wire: float = 1.0  # Bytes that travel over bytes of gradients
    every: int = 1  # Steps between synchronisations; above 1: no other communication
    through_host: bool = False  # Whether ranks of a host may sum and update in shared memory
    copies: int = 1  # Copies of all gradients in a rank's memory: into buckets, and out of them
    by_library: bool = False  # Whether buckets are torch DDP's
    low_rank: int | None = None  # PowerSGD's rank; matrices travel as their factors


_DDP = Traffic(by_library=True)
_AFTERWARDS = replace(_DDP, overlap=False, copies=0)
_BY_LIBRARY = {
    "ddp": _DDP,
    "fsdp": replace(_DDP, shard="weights"),
    "powersgd": replace(_DDP, low_rank=1),
    "naive": replace(_AFTERWARDS, grouping="parameter"),
    "local_sgd": replace(_AFTERWARDS, grouping="flat", every=8),
    "diloco": replace(_AFTERWARDS, grouping="flat", every=100),
}
"""Strategies without a recipe, with the defaults of their options."""


def traffic_of(strategy: str, device: Kind = "cpu") -> Traffic:
    """The messages of a strategy, as `gradsync train` runs it on these devices; ConfigError for an
    unknown one."""
    found = find_strategy(strategy)
    recipe = found.recipe
    if recipe is None:
        return _BY_LIBRARY[found.name]
    algorithm = "best" if recipe.reduction == "backend" else recipe.reduction
    if recipe.order == "invariant":
        algorithm = "tree"
    return Traffic(
        grouping=recipe.grouping,
        bucket_mb=recipe.bucket_size_mb(device),
        overlap=recipe.overlap,
        late=recipe.shard != "none" or algorithm == "tree" or shares_memory(recipe),
        shard=recipe.shard,
        algorithm=algorithm,
        wire=1.0 if recipe.wire == "same" else 0.5,
        through_host=shares_memory(recipe),
    )


def shares_memory(recipe: Recipe) -> bool:
    """Whether ranks of one CPU host can sum, and keep their weights, in shared memory."""
    plain = ("buckets", "none", "backend", "same")
    return (recipe.grouping, recipe.shard, recipe.reduction, recipe.wire) == plain
