"""Grouping x order x reduction x wire x sharding: a strategy as one checked value."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradsync.errors import ConfigError

Grouping = Literal["parameter", "flat", "buckets"]
Order = Literal["any", "invariant"]
ReductionName = Literal["backend", "ring", "recursive_doubling", "hierarchical"]
Wire = Literal["same", "bf16", "fp16"]
Shard = Literal["none", "optimizer", "gradients"]
Collective = Literal["auto", "shared_memory", "backend"]
UpdateOf = Literal["auto", "whole"]
Weights = Literal["replicas", "shared"]
Kind = Literal["size", "number", "count", "flag"] | tuple[str, ...]
"""Values that an option accepts: a positive number, any number, a whole number from 1 on, true or
false, or one of these words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The way in which the engine makes gradients global.

    Raises:
        ConfigError: a value or a combination that does not exist, naming those that do.
    """

    grouping: Grouping = "buckets"
    """One message per parameter, one for everything, or buckets."""
    bucket_mb: float = 25.0
    """Size at which a bucket is closed, MiB."""
    first_bucket_mb: float = 1.0
    """Size of the first bucket, MiB: smaller, so that communication begins early."""
    overlap: bool = True
    """Communicate while backward still runs; False waits for its end."""
    order: Order = "any"
    """invariant: sums follow the fixed tree over leaves, so bits do not depend on ranks."""
    reduction: ReductionName = "backend"
    """The adder: the process group's all_reduce, or one of gradsync's algorithms."""
    wire: Wire = "same"
    """The dtype sent: the gradients' own, or 16 bits."""
    shard: Shard = "none"
    """Memory divided among the ranks: none, the optimizer's, or the gradients' too."""
    collective: Collective = "auto"
    """Carrier of sums, under reduction='backend' and inside the hosts of 'hierarchical': the
    process group, or memory that the ranks of one host share; auto takes the latter on CPUs where
    it is available."""
    update: UpdateOf = "auto"
    """Through shared memory: auto lets each rank update its share of the weights, for all ranks of
    the host, where the optimizer is elementwise; whole leaves the whole gradient in `.grad` on
    every rank, for hooks that read it, and each rank updates everything."""
    weights: Weights = "replicas"
    """Through shared memory: one copy per rank, or one for all ranks of the host, which then only
    `sync.step` may change."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            check_value(name, getattr(self, name), get_args(allowed))
        for name in ("bucket_mb", "first_bucket_mb"):
            check_value(name, getattr(self, name), "size")
        check_value("overlap", self.overlap, "flag")
        if self.order == "invariant":
            self._check_invariant()
        if self.wire != "same" and self.reduction != "backend":
            raise ConfigError(
                f"wire={self.wire!r} goes with reduction='backend'; got {self.reduction!r}"
            )
        legal = ("any", "backend", "same")
        if self.shard == "gradients" and (self.order, self.reduction, self.wire) != legal:
            raise ConfigError(
                "shard='gradients' goes with order='any', reduction='backend' and wire='same' "
                "(the clipping norm is summed shard by shard); got "
                f"order={self.order!r}, reduction={self.reduction!r}, wire={self.wire!r}; "
                "shard='optimizer' goes with all of them"
            )

    def _check_invariant(self) -> None:
        if self.reduction not in ("backend", "hierarchical"):
            raise ConfigError(
                f"order='invariant' adds along its own tree, which reduction={self.reduction!r} "
                "cannot follow (a ring's order depends on the number of ranks); use "
                "reduction='backend' or 'hierarchical'"
            )
        if self.wire != "same":
            raise ConfigError(
                f"order='invariant' cannot round on the wire (wire={self.wire!r}): how often a "
                "sum is rounded would depend on the number of ranks; use wire='same'"
            )


def check_value(name: str, value: Any, kind: Kind) -> None:
    """Check that an option can have this value.

    Args:
        name: of the option.
        value: to check.
        kind: values that the option accepts.

    Raises:
        ConfigError: it cannot; the message says which values it can.
    """
    if isinstance(kind, tuple):
        fits, wanted = value in kind, f"one of {', '.join(kind)}"
    elif kind == "flag":
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind == "count":
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        wanted = "a whole number, at least 1"
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and abs(value) <= sys.float_info.max and (kind == "number" or value > 0)
        wanted = "a finite number"
        if kind == "size":
            wanted = "a positive, finite number" if not is_number or value > 0 else "positive"
    if not fits:
        raise ConfigError(f"{name} must be {wanted}; got {value!r}")


_ALLOWED = {
    "grouping": Grouping,
    "order": Order,
    "reduction": ReductionName,
    "wire": Wire,
    "shard": Shard,
    "collective": Collective,
    "update": UpdateOf,
    "weights": Weights,
}
