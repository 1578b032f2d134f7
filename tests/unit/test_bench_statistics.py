"""Medians, quartiles and ratios by value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.bench.report import Spread, percentile, ratios, spread


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 50, 5.0),
        ([4.0, 2.0], 50, 3.0),
        ([3.0, 1.0, 2.0], 0, 1.0),
        ([3.0, 1.0, 2.0], 100, 3.0),
        ([0.0, 10.0, 20.0, 30.0, 40.0], 95, 38.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_quartiles_hold_the_middle_half() -> None:
    assert spread([9.0, 1.0, 3.0, 5.0, 7.0]) == Spread(median=5.0, low=3.0, high=7.0, count=5)


@given(st.lists(st.floats(0.001, 1000), min_size=1))
def test_a_spread_is_in_order_and_within_its_values(values: list[float]) -> None:
    found = spread(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_ratios_go_round_by_round() -> None:
    assert ratios([2.0, 30.0], [1.0, 10.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])
