"""When the gradients of a bucket are there, from the model's shape alone; pure, no torch.

Backward goes through the layers from the last to the first, and each one's gradient takes its
share of the products (`parameter_sizes.Parameter.backward_units`). Buckets are the engine's own
plan over parameters in reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from gradsync.hardware.timing.parameter_sizes import Parameter, parameters_of
from gradsync.hardware.timing.step_profile import BucketReady
from gradsync.hardware.timing.traffic import Traffic
from gradsync.hardware.workload import Workload
from gradsync.sync.engine.plan import BucketPlan, Item, plan_buckets

MIB = 2**20
GRADIENT_BYTES = 4
"""Weights and gradients are fp32, whatever autocast computes in."""


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
    ready = {
        len(parameters) - 1 - place: backward_s * units / done[-1]
        for place, units in enumerate(done)
    }
    buckets = [
        BucketReady(
            num_bytes=sum(slot.numel for slot in plan.slots) * GRADIENT_BYTES,
            ready_s=max(ready[slot.index] for slot in plan.slots),
        )
        for plan in bucket_plan(parameters, traffic)
    ]
    return tuple(sorted(buckets, key=lambda bucket: bucket.ready_s))
