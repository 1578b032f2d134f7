"""Which gradients travel together: every parameter once, aligned, kinds apart."""

from __future__ import annotations

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.sync.layout import ALIGNMENT, BucketPlan, Item, plan_buckets

SIZES = st.integers(0, 400)
KINDS = st.sampled_from([("fp32", 4), ("bf16", 2), ("fp64", 8)])
LIMITS = st.sampled_from([0.0, 1.0, 300.0, 1024.0, 5000.0, math.inf])


def items(*sizes: int, itemsize: int = 4, kind: str = "fp32") -> list[Item]:
    return [Item(numel=numel, itemsize=itemsize, kind=kind) for numel in sizes]


def indices(plans: tuple[BucketPlan, ...]) -> list[list[int]]:
    return [[slot.index for slot in plan.slots] for plan in plans]


@st.composite
def plannable(draw: st.DrawFn) -> tuple[list[Item], list[int]]:
    things = [
        Item(numel=draw(SIZES), itemsize=itemsize, kind=kind)
        for kind, itemsize in draw(st.lists(KINDS, min_size=1, max_size=12))
    ]
    return things, draw(st.permutations(range(len(things))))


@given(plannable(), LIMITS, st.none() | LIMITS, st.booleans(), st.integers(1, 9))
def test_any_plan(
    given_items: tuple[list[Item], list[int]],
    limit: float,
    first_limit: float | None,
    like_ddp: bool,
    world_size: int,
) -> None:
    things, order = given_items
    plans = plan_buckets(
        things,
        order,
        bucket_bytes=limit,
        first_bucket_bytes=first_limit,
        like_ddp=like_ddp,
        world_size=world_size,
    )
    assert sorted(chain.from_iterable(indices(plans))) == list(range(len(things)))
    for plan in plans:
        kinds = {things[slot.index].kind for slot in plan.slots}
        assert len(kinds) == 1
        places = [order.index(slot.index) for slot in plan.slots]
        assert places == sorted(places), "the order is kept inside of a bucket"
        end = 0
        for slot in plan.slots:
            assert slot.numel == things[slot.index].numel
            assert slot.offset % ALIGNMENT == 0
            assert end <= slot.offset < end + ALIGNMENT, "behind the last one, no further than need"
            end = slot.offset + slot.numel
        assert plan.numel % (ALIGNMENT * world_size) == 0
        assert max(end, 1) <= plan.numel < max(end, 1) + ALIGNMENT * world_size


@given(st.integers(1, 9), st.lists(SIZES, min_size=1, max_size=5))
def test_shards_are_equal_aligned_and_cover_the_bucket(world_size: int, sizes: list[int]) -> None:
    (plan,) = plan_buckets(
        items(*sizes), range(len(sizes)), bucket_bytes=math.inf, world_size=world_size
    )
    shards = [plan.shard(rank, world_size) for rank in range(world_size)]
    assert [i for shard in shards for i in shard] == list(range(plan.numel))
    assert {len(shard) for shard in shards} == {plan.numel // world_size}
    assert all(shard.start % ALIGNMENT == 0 for shard in shards)


HALF = {"itemsize": 2, "kind": "bf16"}


@pytest.mark.parametrize(
    ("things", "limit", "expected"),
    [
        (items(5, 0, 7), 0, [[0], [1], [2]]),
        ([*items(5, 6), *items(7, 8, **HALF)], math.inf, [[0, 1], [2, 3]]),
        (items(*[64] * 4), 512, [[0, 1], [2, 3]]),
        (items(*[64] * 4), 513, [[0, 1, 2], [3]]),
        (items(*[64] * 4, itemsize=8, kind="fp64"), 512, [[0], [1], [2], [3]]),
        ([*items(10), *items(10, **HALF)] * 3, 10_000, [[0, 2, 4], [1, 3, 5]]),
    ],
    ids=["zero", "infinity", "exactly", "one byte more", "bytes", "kinds that alternate"],
)
def test_a_bucket_closes_once_it_holds_the_limit(
    things: list[Item], limit: float, expected: list[list[int]]
) -> None:
    plans = plan_buckets(things, range(len(things)), bucket_bytes=limit, world_size=2)
    assert sorted(indices(plans)) == expected


def sizes(num_items: int, *, like_ddp: bool = False, limit: float = 1100) -> list[int]:
    """Number of items, of 256 bytes, in each bucket; the first has one."""
    things = items(*[64] * num_items)
    plans = plan_buckets(
        *(things, range(num_items)),
        bucket_bytes=limit,
        first_bucket_bytes=256,
        like_ddp=like_ddp,
        world_size=1,
    )
    return [len(plan.slots) for plan in plans]


def test_sizes_double_up_to_the_limit_and_halve_towards_the_end() -> None:
    assert sizes(20) == [1, 2, 4, 5, 4, 2, 1, 1]
    assert sizes(40) == [1, 2, 4, 5, 5, 5, 5, 5, 4, 2, 1, 1]
    assert sizes(20, like_ddp=True) == [1, 5, 5, 5, 4]
    assert sizes(6, limit=256) == [1] * 6
    assert sizes(1) == [1]
    assert sizes(2) == [1, 1]


def test_the_last_bucket_begins_with_a_large_parameter() -> None:
    """As an embedding is: backward finishes it last, and what came before need not wait for it."""
    things = items(*[64] * 4, 1000)
    plans = plan_buckets(things, range(5), bucket_bytes=9000, first_bucket_bytes=512, world_size=1)
    assert indices(plans) == [[0, 1], [2, 3], [4]]
    small = plan_buckets(things, range(5), bucket_bytes=9000, first_bucket_bytes=1e6, world_size=1)
    assert indices(small) == [[0, 1, 2, 3, 4]], "all of it is less than a last bucket"
