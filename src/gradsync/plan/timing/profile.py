"""The costs of one leaf and one update on a device, and when each gradient is there; pure.

Backward goes through the layers from the last to the first, and each one's gradient takes its
share of the products (`Parameter.backward_units`). Buckets are the engine's own plan over
parameters in reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from gradsync.models.config import GPTConfig
from gradsync.parallel.layout import EMBEDDING, weights_of
from gradsync.plan.timing.traffic import Traffic
from gradsync.plan.workload import Workload
from gradsync.sync.layout import BucketPlan, Item, plan_buckets

MIB = 2**20
GRADIENT_BYTES = 4
"""Weights and gradients are fp32, whatever autocast computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketReady:
    """When a bucket's last gradient is there."""

    num_bytes: int
    """Bytes of its gradients."""
    ready_s: float
    """Seconds after backward began; the last one's is at most `StepProfile.backward_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One rank's work, alone on its device, without any communication."""

    forward_s: float
    """One leaf's; likewise `backward_s`."""
    backward_s: float
    update_s: float
    """Clipping and optimizer over all parameters."""
    buckets: tuple[BucketReady, ...]
    """In the order in which they fill."""
    jitter: tuple[float, ...] = (1.0,)
    """Durations of a leaf over their median, as measured; stragglers are drawn from them."""
    measured: bool = False
    """False: estimated from peak arithmetic and bandwidth."""

    @property
    def leaf_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StepProfile:
        """The inverse of `dataclasses.asdict`, as JSON keeps it."""
        buckets = tuple(BucketReady(**bucket) for bucket in document["buckets"])
        read: dict[str, Any] = {"buckets": buckets, "jitter": tuple(document["jitter"])}
        return cls(**{**document, **read})


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One trained tensor."""

    name: str
    """As `named_parameters` calls it."""
    shape: tuple[int, ...]
    backward_units: int
    """The work of backward between the gradient before this one and this one, in products per
    token, of which each takes 4 floating-point operations (2 for the gradient of the weight, 2 for
    that of the input): the parameter's elements, and behind the queries' side attention itself."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def parameters_of(config: GPTConfig, seq_len: int) -> list[Parameter]:
    """Every parameter of `GPT(config)`, in `named_parameters` order.

    Args:
        config: the shape.
        seq_len: tokens of a sequence; attention's cost grows with it.
    """
    head = config.vocab_size * config.n_embd if config.tie_head else 0
    found = []
    for weight in weights_of(config):
        units = prod(weight.shape)
        if weight.name == EMBEDDING:
            units = 0
        elif weight.name.endswith("attention.v.weight"):
            # Forward's two products of 2 T C operations each cost 8 T C in backward, before the
            # gradients of the three projections: the first of which to be ready is this one.
            units += 2 * seq_len * config.n_embd
        elif weight.name == "norm.weight":
            # The head's products come first in backward; a tied one adds its gradient to the
            # embedding's, which is complete last of all.
            units += head
        found.append(Parameter(name=weight.name, shape=weight.shape, backward_units=units))
    return found


def bucket_plan(parameters: Sequence[Parameter], traffic: Traffic) -> tuple[BucketPlan, ...]:
    """Which parameters travel together, in the order in which backward finishes them."""
    sizes = {"parameter": 0.0, "flat": math.inf, "buckets": traffic.bucket_mb * MIB}
    first = traffic.first_bucket_mb * MIB if traffic.grouping == "buckets" else None
    return plan_buckets(
        [Item(numel=p.numel, itemsize=GRADIENT_BYTES, kind="fp32") for p in parameters],
        range(len(parameters))[::-1],
        bucket_bytes=sizes[traffic.grouping],
        first_bucket_bytes=first,
        world_size=1,
    )


def bucket_timeline(work: Workload, traffic: Traffic, backward_s: float) -> tuple[BucketReady, ...]:
    """Each bucket's bytes and when it is full, in the order in which they fill.

    Args:
        work: names the model.
        traffic: says what goes together.
        backward_s: of one leaf; the last bucket is full at its end.
    """
    parameters = parameters_of(work.model, work.seq_len)
    done = list(accumulate(p.backward_units for p in reversed(parameters)))
    ready = [backward_s * units / done[-1] for units in reversed(done)]
    buckets = [
        BucketReady(
            num_bytes=sum(slot.numel for slot in plan.slots) * GRADIENT_BYTES,
            ready_s=max(ready[slot.index] for slot in plan.slots),
        )
        for plan in bucket_plan(parameters, traffic)
    ]
    return tuple(sorted(buckets, key=lambda bucket: bucket.ready_s))
