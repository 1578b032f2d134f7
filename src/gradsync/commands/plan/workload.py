"""The run to plan, and how it is divided over ranks; pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.description import Kind
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
    loss_rows: int | None = None  # Positions whose loss is computed at a time; None: all
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
    shared_weights: bool = False
    """One copy of weights and optimizer state for all ranks of a host (CPU, shared memory)."""

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
    """The sizes above 1; in the usual order, as `gradsync train --parallel` takes them."""
    sizes = {name: getattr(layout, name) for name in names}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def goes_with_parts(sync: str) -> bool:
    """Whether a strategy sums whole replicas of a model's part; see `parallel/split_sync.py`."""
    recipe = find_strategy(sync).recipe
    if recipe is None:
        return sync == "naive"
    return recipe.shard == "none" and recipe.reduction != "hierarchical"
