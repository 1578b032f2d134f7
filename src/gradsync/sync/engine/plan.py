"""Assignment of gradients to buckets: a pure plan from sizes and an order, without torch.

    order      p3   p1   p0   p2            (the order in which backward finishes them)
    bucket 0 [ p3 . ]                       small: communication begins early
    bucket 1      [ p1 . p0 ...... ]        `.` is padding
    bucket 2                  [ p2 .. ]

Parameters start at multiples of 64 elements and a bucket's length is a multiple of 64 x ranks, so
that shards are cut at multiples of 64 elements *within* a parameter: there a fused optimizer gives
the same bits for a piece as for the whole (its vector loops end nowhere else; sharded/rounding.py
describes the effect of several threads on 16-bit parameters).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements; parameters and shards start at multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Properties of a parameter that the plan depends on."""

    numel: int
    """Number of elements."""
    itemsize: int
    """Bytes of an element."""
    kind: Hashable
    """Dtype and device; only parameters of one kind share a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in a bucket."""

    index: int
    """Index of the parameter."""
    offset: int
    """First element in the bucket."""
    numel: int
    """Number of elements, without the padding behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """One bucket: slots in the order in which they are expected to fill."""

    slots: tuple[Slot, ...]
    numel: int
    """Length with padding, elements; a multiple of `ALIGNMENT` x ranks."""

    def shard(self, rank: int, world_size: int) -> range:
        """Elements that belong to `rank`: equal parts, in rank order."""
        part = self.numel // world_size
        return range(rank * part, (rank + 1) * part)


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],
    *,
    bucket_bytes: float,
    first_bucket_bytes: float | None = None,
    world_size: int,
) -> tuple[BucketPlan, ...]:
    """Cut `order` into buckets, closed as soon as they hold `bucket_bytes`.

    Args:
        items: every parameter.
        order: a permutation of the parameters' indices.
        bucket_bytes: 0 gives every parameter its own bucket, `inf` makes one per kind.
        first_bucket_bytes: size of the first bucket; None: as the others.
        world_size: ranks that divide a bucket into shards.
    """
    assert sorted(order) == list(range(len(items))), "the order must name every parameter once"
    open_slots: dict[Hashable, list[Slot]] = {}
    plans: list[BucketPlan] = []
    limit = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    for index in order:
        item = items[index]
        slots = open_slots.setdefault(item.kind, [])
        start = _aligned(slots[-1].offset + slots[-1].numel) if slots else 0
        slots.append(Slot(index=index, offset=start, numel=item.numel))
        if (start + item.numel) * item.itemsize >= limit:
            plans.append(_close(open_slots.pop(item.kind), world_size))
            limit = bucket_bytes
    plans += [_close(slots, world_size) for slots in open_slots.values()]
    return tuple(plans)


def _close(slots: list[Slot], world_size: int) -> BucketPlan:
    used = slots[-1].offset + slots[-1].numel
    multiple = ALIGNMENT * world_size
    return BucketPlan(slots=tuple(slots), numel=max(math.ceil(used / multiple), 1) * multiple)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
