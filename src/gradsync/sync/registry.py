"""A table of all strategies; tests, commands and the guide's table iterate over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.sync.options import (
    DdpOptions,
    DilocoOptions,
    FsdpOptions,
    LocalSgdOptions,
    Options,
    PowerSgdOptions,
    Recipe,
)

Promise = Literal["bitwise", "rounding", "lossy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A named way to synchronise gradients."""

    name: str
    """The name that users type."""
    summary: str
    """A summary in one line."""
    cost: str
    """Bytes per rank and step (S = size of the gradients, W = ranks), operations, memory."""
    promise: Promise = "rounding"
    """bitwise: the bits of one rank; rounding: equal to one rank except for the order of sums;
    lossy: rounds or omits something, on purpose."""
    defaults: Options = field(default_factory=Options)
    """The options that define the strategy; users can override each."""
    equal_leaves: bool = False
    """True if all ranks must have the same number of leaves in a step."""
    needs_group: bool = False
    """True if it is of no use on one rank (then `naive` runs, which does nothing there)."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(each.name for each in fields(self.defaults))

    @property
    def same_on_any_ranks(self) -> bool:
        """Whether its bits do not depend on the number of ranks."""
        return self.recipe is not None and self.recipe.order == "invariant"

    @property
    def recipe(self) -> Recipe | None:
        """The engine's recipe; None for strategies that do not use the engine."""
        return self.defaults if isinstance(self.defaults, Recipe) else None


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="naive",
            summary="one blocking all-reduce per parameter after backward; the readable twin",
            cost="2(W-1)/W S bytes, one operation per parameter, no extra memory",
        ),
        Strategy(
            name="flat",
            summary="one all-reduce of everything after backward",
            cost="2(W-1)/W S bytes, one operation per dtype, no extra memory",
            defaults=Recipe(grouping="flat", overlap=False),
        ),
        Strategy(
            name="overlap",
            summary="one all-reduce per parameter, as soon as its gradient is ready",
            cost="2(W-1)/W S bytes, one operation per parameter, no extra memory",
            defaults=Recipe(grouping="parameter"),
        ),
        Strategy(
            name="bucketed",
            summary="buckets of bucket_mb, each all-reduced as soon as backward has filled it",
            cost="2(W-1)/W S bytes, one operation per bucket, no extra memory (two, and a "
            "bucket, with overlap_publish)",
            defaults=Recipe(),
        ),
        Strategy(
            name="invariant",
            summary="bucketed, summed along a fixed tree over micro-batches: the same bits on any "
            "number of ranks",
            cost="2(W-1)/W S bytes with equal shares (more with uneven ones), two operations per "
            "bucket, a bucket, and S per open tree level (none with one micro-batch a rank)",
            promise="bitwise",
            defaults=Recipe(order="invariant"),
        ),
        Strategy(
            name="invariant_bf16",
            summary="as invariant, every node of the tree rounded to bf16: the same bits on any "
            "number of ranks, at half the bytes",
            cost="(W-1)/W S bytes with equal shares (more with uneven ones), two operations per "
            "bucket, S/2 beside the gradients, and S/2 per open tree level",
            promise="lossy",
            defaults=Recipe(order="invariant", wire="bf16"),
        ),
        Strategy(
            name="ring",
            summary="bucketed, by our own ring: reduce-scatter, then all-gather, from sends",
            cost="2(W-1)/W S bytes, 2(W-1) operations per bucket, one chunk",
            defaults=Recipe(reduction="ring"),
        ),
        Strategy(
            name="hierarchical",
            summary="bucketed, inside each host first, then between hosts shard by shard",
            cost="2(H-1)/H S/L bytes between H hosts of L ranks, 2(L-1)/L S inside, "
            "2(L-1) + 2(H-1) operations per bucket, one shard",
            defaults=Recipe(reduction="hierarchical"),
        ),
        Strategy(
            name="bf16",
            summary="bucketed, in bf16 on the wire",
            cost="(W-1)/W S bytes, one operation per bucket, S/2 for fp32 gradients",
            promise="lossy",
            defaults=Recipe(wire="bf16"),
        ),
        Strategy(
            name="fp16",
            summary="bucketed, in fp16 on the wire, scaled so that nothing overflows",
            cost="(W-1)/W S bytes, two operations per bucket, S/2 for fp32 gradients",
            promise="lossy",
            defaults=Recipe(wire="fp16"),
        ),
        Strategy(
            name="zero1",
            summary="as invariant, and each rank keeps and updates its share of the optimizer's "
            "state (ZeRO-1)",
            cost="2(W-1)/W S bytes with equal shares (more with uneven ones), two operations per "
            "bucket, state/W instead of state",
            promise="bitwise",
            defaults=Recipe(order="invariant", shard="optimizer"),
        ),
        Strategy(
            name="zero2",
            summary="reduce-scatter of each bucket; optimizer state and summed gradients in shares "
            "(ZeRO-2)",
            cost="2(W-1)/W S bytes (3 on gloo), two operations per bucket, state/W and S/W after "
            "backward",
            defaults=Recipe(shard="gradients"),
        ),
        Strategy(
            name="fsdp",
            summary="torch's FSDP2: parameters, gradients and optimizer state in shares, gathered "
            "block by block",
            cost="(W-1)/W S bytes per micro-batch for each of two gathers, and once for the "
            "reduce-scatter, three operations per block, everything/W plus two whole blocks",
            defaults=FsdpOptions(),
            equal_leaves=True,
            needs_group=True,
        ),
        Strategy(
            name="ddp",
            summary="torch's DistributedDataParallel, buckets overlapped with backward",
            cost="2(W-1)/W S bytes, one operation per bucket, S bytes of buckets",
            defaults=DdpOptions(),
            needs_group=True,
        ),
        Strategy(
            name="powersgd",
            summary="torch's PowerSGD on DDP: low-rank gradients, the error fed back",
            cost="2(W-1)/W r(n+m) elements' bytes per n x m matrix at rank r, the rest whole, "
            "three operations per bucket, 2 S",
            promise="lossy",
            defaults=PowerSgdOptions(),
            needs_group=True,
        ),
        Strategy(
            name="local_sgd",
            summary="step alone, average the weights every inner_steps steps",
            cost="2(W-1)/W S bytes every inner_steps steps, one operation per dtype, S while "
            "ranks meet",
            promise="lossy",
            defaults=LocalSgdOptions(),
        ),
        Strategy(
            name="diloco",
            summary="step alone, then one outer Nesterov step along the mean distance",
            cost="2(W-1)/W S bytes every inner_steps steps, one operation per dtype, 2 S, and 2 S "
            "more while ranks meet",
            promise="lossy",
            defaults=DilocoOptions(),
        ),
    )
}


def check_options(strategy: Strategy, options: Mapping[str, Any]) -> Options:
    """The strategy's options, overridden by `options`; checks them before anything is built.

    Raises:
        ConfigError: an option that the strategy does not have, or values that conflict.
    """
    for name in options:
        if name not in strategy.options:
            known = ", ".join(strategy.options) or "none"
            raise ConfigError(
                f"strategy={strategy.name!r} has no option {name!r} (it has: {known})"
            )
    short = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    words = {name: short.get(str(value), value) for name, value in options.items()}
    checked = replace(strategy.defaults, **words)
    if isinstance(checked, Recipe) and strategy.same_on_any_ranks:
        rounds = strategy.promise == "lossy"
        if checked.order != "invariant" or (checked.wire != "same") != rounds:
            raise ConfigError(
                f"strategy={strategy.name!r} names its bits, which order={checked.order!r} and "
                f"wire={checked.wire!r} would change; strategy='bucketed' takes both options, "
                "strategy='invariant_bf16' rounds each node of the tree"
            )
    return checked


def find_strategy(name: str) -> Strategy:
    """Look up the strategy called `name`.

    Raises:
        ConfigError: unknown name; the message names the nearest one.
    """
    check_name("sync strategy", name, STRATEGIES)
    return STRATEGIES[name]
