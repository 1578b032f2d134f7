"""Who stands where in a layout, and what a request for one must say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigError
from gradsync.parallel.layout import Coordinates, Layout, parse_layout

LAYOUTS = st.builds(Layout, dp=st.integers(1, 5), pp=st.integers(1, 5), tp=st.integers(1, 5))


@given(LAYOUTS)
def test_every_rank_has_a_place_of_its_own(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert len(set(places)) == layout.dp * layout.pp * layout.tp


def test_shards_are_neighbours_and_replicas_furthest_apart() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    assert layout.coordinates(1) == Coordinates(data=0, stage=0, shard=1)
    assert layout.coordinates(2) == Coordinates(data=0, stage=1, shard=0)
    assert layout.coordinates(4) == Coordinates(data=1, stage=0, shard=0)
    assert layout.model_ranks == 4


@given(LAYOUTS)
def test_a_layout_reads_back(layout: Layout) -> None:
    assert parse_layout(str(layout), layout.world_size) == layout


@pytest.mark.parametrize(
    ("text", "world_size", "layout"),
    [
        ("", 3, Layout(dp=3)),
        ("tp=2", 2, Layout(tp=2)),
        ("pp=2", 6, Layout(dp=3, pp=2)),
        (" pp = 2 , dp=1,", 2, Layout(pp=2)),
        ("dp=4", 4, Layout(dp=4)),
    ],
)
def test_what_is_not_said_is_one_or_what_is_left(
    text: str, world_size: int, layout: Layout
) -> None:
    assert parse_layout(text, world_size) == layout


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("foo", 4, "got 'foo', expected sizes such as pp=2,dp=2"),
        ("xp=2", 4, "got 'xp=2'"),
        ("pp=", 4, "got 'pp='"),
        ("pp=-1", 4, "got 'pp=-1'"),
        ("pp=²", 4, "got 'pp=²'"),
        ("pp=0", 4, "pp must be a positive integer"),
        ("pp=2,pp=2", 4, "pp is given twice"),
        ("pp=3", 4, "dp=1,pp=3,tp=1 is 3 ranks, but there are 4"),
        ("pp=2,dp=2", 2, "is 4 ranks, but there are 2"),
    ],
)
def test_requests_that_make_no_layout(text: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^parallel: .*{message}") as caught:
        parse_layout(text, world_size)
    assert "\n" not in str(caught.value)
