"""Messages of each strategy in a step, and when they travel; pure, no torch.

What a strategy computes for its messages is not here: PowerSGD's factors, diloco's outer step.

in backward     all_reduce or reduce_scatter of each bucket, beside backward or after it
after update    all_gather of the weights, where each rank has updated a share
per leaf        gathers before each block computes (fsdp)
now and then    an all_reduce of the weights every so many steps (local_sgd, diloco)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradsync.errors import ConfigError
from gradsync.sync.options import Grouping, Recipe
from gradsync.sync.registry import Strategy, check_options, find_strategy

INNER_STEPS = {"local_sgd": 8, "diloco": 100}
"""Steps between two meetings, where no option says it; as their reducers have it."""
_RANK = 1
"""PowerSGD's, torch's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of one strategy with its options."""

    grouping: Grouping = "buckets"
    """Which gradients travel together."""
    bucket_mb: float = 25.0
    """MiB."""
    first_bucket_mb: float = 1.0
    """MiB."""
    overlap: bool = True
    """Whether it communicates beside backward, where something else than the computing cores does
    the communicating."""
    operation: Literal["all_reduce", "reduce_scatter"] = "all_reduce"
    """A bucket's collective."""
    algorithm: str = "best"
    """A name in `collective_cost.ALL_REDUCE`, or best."""
    wire: float = 1.0
    """Bytes that travel over bytes of gradients."""
    gathers_weights: bool = False
    """After the update."""
    gathers_blocks: bool = False
    """In each leaf's forward and backward, and gradients are reduced in each leaf's backward."""
    update_in_shares: bool = False
    """Each rank updates its part only."""
    every: int = 1
    """Steps between two meetings; more than 1: no other communication."""
    through_host: bool = False
    """Whether ranks of one host may share memory instead, and divide the update among them."""
    copies: int = 1
    """Copies of all gradients in a rank's memory: into buckets, and out of them."""
    agrees: bool = True
    """Whether a small message ends the step."""
    by_library: bool = False
    """Whether the process group's own collectives are called (gloo, NCCL), whatever is there."""
    low_rank: int | None = None
    """PowerSGD's rank; matrices travel as their factors."""


def traffic_of(strategy: str, options: Mapping[str, Any] | None = None) -> Traffic:
    """The messages of the strategy of that name.

    Args:
        strategy: a name of the registry; `torch_ddp` stands for `ddp` as torch's users run it.
        options: as `gradsync train` takes them.

    Raises:
        ConfigError: unknown strategy or option.
    """
    found = find_strategy("ddp" if strategy == "torch_ddp" else strategy)
    given = dict(options or {})
    check_options(found, given)
    if found.recipe is not None:
        return _of_recipe(replace(found.recipe, **given))
    traffic = _of_other(found, given)
    if strategy == "torch_ddp":  # as torch's users run it: gradients are not views into buckets
        return replace(traffic, copies=2, agrees=False)
    return traffic


def _of_recipe(recipe: Recipe) -> Traffic:
    algorithm = {"ring": "ring", "recursive_doubling": "doubling", "hierarchical": "hierarchical"}
    chosen = algorithm.get(recipe.reduction, "best")
    if recipe.order == "invariant" and recipe.reduction == "backend":
        chosen = "owners"
    return Traffic(
        grouping=recipe.grouping,
        bucket_mb=recipe.bucket_mb,
        first_bucket_mb=recipe.first_bucket_mb,
        overlap=recipe.overlap,
        operation="reduce_scatter" if recipe.shard == "gradients" else "all_reduce",
        algorithm=chosen,
        wire=1.0 if recipe.wire == "same" else 0.5,
        gathers_weights=recipe.shard != "none",
        update_in_shares=recipe.shard != "none",
        by_library=recipe.collective == "backend",
        through_host=recipe.collective != "backend"
        and recipe.update == "auto"
        and (recipe.shard, recipe.reduction, recipe.wire) == ("none", "backend", "same")
        and recipe.grouping == "buckets",
    )


def _of_other(strategy: Strategy, options: Mapping[str, Any]) -> Traffic:
    name = strategy.name
    if name == "naive":
        return Traffic(grouping="parameter", overlap=False, copies=0, by_library=True)
    if name == "fsdp":
        return Traffic(
            operation="reduce_scatter",
            by_library=True,
            gathers_blocks=True,
            update_in_shares=True,
            wire=0.5 if options.get("compute_dtype") in ("bf16", "fp16") else 1.0,
        )
    if name in INNER_STEPS:
        steps = options.get("inner_steps", INNER_STEPS[name])
        return Traffic(grouping="flat", overlap=False, copies=0, by_library=True, every=steps)
    bucket_mb = float(options.get("bucket_mb", 25.0))
    if name == "powersgd":
        rank = options.get("matrix_approximation_rank", _RANK)
        return Traffic(bucket_mb=bucket_mb, by_library=True, low_rank=rank)
    if name == "ddp":
        return Traffic(bucket_mb=bucket_mb, by_library=True)
    raise ConfigError(f"no traffic is known of strategy {name!r}")
