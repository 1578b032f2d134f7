"""Pieces by value: together they are every parameter, once, cut at multiples of 64."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from gradsync.sync.layout import ALIGNMENT, Item, Piece, pieces_of_shard, plan_buckets


def test_a_bucket_of_two_parameters_on_three_ranks() -> None:
    items = [Item(numel=n, itemsize=4, kind="float32") for n in (200, 130)]
    (plan,) = plan_buckets(items, [1, 0], bucket_bytes=1e9, world_size=3)
    assert plan.numel == 576
    assert pieces_of_shard(plan, 0, 3) == [Piece(index=1, start=0, stop=130, offset=0)]
    assert pieces_of_shard(plan, 1, 3) == [Piece(index=0, start=0, stop=192, offset=0)]
    assert pieces_of_shard(plan, 2, 3) == [Piece(index=0, start=192, stop=200, offset=0)]


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    world_size=st.integers(1, 6),
    bucket_bytes=st.sampled_from([0, 1000, 1e9]),
)
def test_pieces_are_everything_once(sizes: list[int], world_size: int, bucket_bytes: float) -> None:
    items = [Item(numel=n, itemsize=4, kind="float32") for n in sizes]
    plans = plan_buckets(items, range(len(sizes)), bucket_bytes=bucket_bytes, world_size=world_size)
    owned: dict[int, list[int]] = {index: [] for index in range(len(sizes))}
    for plan in plans:
        for rank in range(world_size):
            for piece in pieces_of_shard(plan, rank, world_size):
                assert piece.start % ALIGNMENT == 0
                assert piece.offset % ALIGNMENT == 0
                assert piece.numel > 0 or not sizes[piece.index]
                assert piece.numel <= plan.numel // world_size - piece.offset
                owned[piece.index] += range(piece.start, piece.stop)
    assert {i: list(range(n)) for i, n in enumerate(sizes)} == owned
