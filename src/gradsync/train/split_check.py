"""Whether a run goes with its layout, as far as can be said before ranks start; no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradsync.data.plan import BatchPlan
from gradsync.errors import ConfigError
from gradsync.parallel.layout import Layout, check_divisible
from gradsync.sync.registry import STRATEGIES, find_strategy
from gradsync.train.config import TrainConfig

BY_MESSAGES = {"collective": "backend"}
"""Option of the engine's strategies under a split model: ranks of a host hold different parts, so
there is no memory that all of them would share."""


def goes_with_parts(sync: str) -> bool:
    """Whether the strategy sums whole replicas of a part."""
    strategy = STRATEGIES[sync]
    if strategy.recipe is None:
        return sync == "naive"
    return strategy.recipe.shard == "none" and strategy.recipe.reduction != "hierarchical"


def check_layout(config: TrainConfig, layout: Layout, plan: BatchPlan) -> None:
    """Raise ConfigError, in one line, where a split model cannot be trained so."""
    if layout.model_ranks == 1:
        return
    check_divisible(config.model, layout)
    _check_sync(config)
    if config.dtype == "fp16":
        raise ConfigError(
            "parallel: dtype fp16 scales losses, on which the parts of a model would have to "
            "agree; use bf16 or fp32"
        )
    if config.compile != "none":
        raise ConfigError(f"parallel: a split model is not compiled; drop compile={config.compile}")
    share, rest = divmod(plan.num_leaves, layout.dp)
    if rest:
        raise ConfigError(
            f"parallel: {plan.num_leaves} leaves a step cannot be dealt equally to dp={layout.dp} "
            "replicas; change --tokens-per-update, --micro-batch-size or dp"
        )
    if share < layout.pp:
        raise ConfigError(
            f"parallel: pp={layout.pp} stages need a leaf each at a time, a replica has {share} "
            "in a step; raise --tokens-per-update, or lower --micro-batch-size or pp"
        )


def _check_sync(config: TrainConfig) -> None:
    strategy = find_strategy(config.sync)
    known = ", ".join(name for name in STRATEGIES if goes_with_parts(name))
    if not goes_with_parts(config.sync):
        raise ConfigError(
            f"parallel: sync={config.sync} does not go with a split model; these do: {known}"
        )
    given = config.sync_options.given()
    if strategy.recipe is None:
        return
    if given.get("shard", "none") != "none" or given.get("reduction") == "hierarchical":
        raise ConfigError(
            "parallel: sync_options.shard and reduction=hierarchical do not go with a split model"
        )
    if given.get("collective", "backend") == "shared_memory":
        raise ConfigError(
            "parallel: ranks of a split model hold different parts and share no memory; drop "
            "sync_options.collective"
        )
    options: dict[str, Any] = {**given, **BY_MESSAGES}
    replace(strategy.recipe, **options)  # checks itself
