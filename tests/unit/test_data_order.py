import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.order import SampleOrder
from gradsync.errors import DataError


@given(
    n=st.integers(1, 60),
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_each_epoch_has_every_index_once(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = SampleOrder(n, seed, shuffle)
    assert sorted(order.indices(epoch * n, n).tolist()) == list(range(n))


@given(n=st.integers(1, 40), start=st.integers(0, 100), cuts=st.lists(st.integers(0, 30)))
def test_the_stream_does_not_depend_on_how_it_is_cut(n: int, start: int, cuts: list[int]) -> None:
    order = SampleOrder(n, seed=3)
    pieces, at = [], start
    for count in cuts:
        pieces += order.indices(at, count).tolist()
        at += count
    assert pieces == order.indices(start, sum(cuts)).tolist()


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(100, seed=0)
    first, second = order.indices(0, 100), order.indices(100, 100)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, SampleOrder(100, seed=1).indices(0, 100))


def test_without_shuffling_the_order_of_the_data_set_is_kept() -> None:
    assert SampleOrder(3, 9, shuffle=False).indices(2, 5).tolist() == [2, 0, 1, 2, 0]


def test_no_samples_and_negative_positions_are_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        SampleOrder(0, 0)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(3, 0).indices(-1, 2)
