"""Pieces by value: together they are every parameter, once, cut at multiples of 64."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from gradsync.sync.layout import ALIGNMENT, Item, pieces_of_shard, plan_buckets


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
