"""The order of samples: each once an epoch, the same for ever, and random."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.batch_plan import SampleOrder, derive_key, permute
from gradsync.errors import DataError


@given(
    n=st.integers(1, 60),
    seed=st.integers(-5, 2**70),
    start=st.integers(0, 100),
    cuts=st.lists(st.integers(0, 30)),
    shuffle=st.booleans(),
)
def test_each_epoch_has_every_index_once_however_the_stream_is_cut(
    n: int, seed: int, start: int, cuts: list[int], shuffle: bool
) -> None:
    order = SampleOrder(n, seed, shuffle)
    epoch = start // n
    assert sorted(order.indices(epoch * n, n).tolist()) == list(range(n))
    pieces, at = [], start
    for count in cuts:
        pieces += order.indices(at, count).tolist()
        at += count
    assert pieces == order.indices(start, sum(cuts)).tolist()
    if not shuffle:
        assert pieces == [place % n for place in range(start, at)]


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(100, seed=0)
    first, second = order.indices(0, 100), order.indices(100, 100)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, SampleOrder(100, seed=1).indices(0, 100))


def test_a_data_set_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        SampleOrder(0, 0)


@pytest.mark.parametrize("key", [0, derive_key(7, 3)])
def test_every_size_is_permuted_one_to_one(key: int) -> None:
    for n in (*range(1, 301), 4096, 4097, 65_535, 100_003, 2**17):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n)), n


@given(n=st.integers(2**40, 2**62), key=st.integers(0, 2**64 - 1))
def test_huge_sizes_stay_inside_and_distinct(n: int, key: int) -> None:
    values = permute(np.array([0, 1, 2, n // 2, n - 2, n - 1]), n, key)
    assert 0 <= values.min() <= values.max() < n
    assert len(set(values.tolist())) == 6


def test_the_order_never_changes_from_release_to_release_or_machine_to_machine() -> None:
    """A resumed run depends on these numbers; they were written down once, on x86-64."""
    assert permute(np.arange(10), 10, derive_key(42, 0)).tolist() == [9, 4, 0, 3, 5, 1, 2, 7, 8, 6]
    large = [851726921124, 501397809896, 494039138760, 979221135803]
    assert permute(np.arange(4), 10**12, derive_key(42, 1)).tolist() == large


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_every_item_stands_everywhere_equally_often(n: int) -> None:
    """Chi-square over 2,000 keys, per position; the bound is 5 standard deviations."""
    num_keys = 2000
    table = np.zeros((n, n))
    for seed in range(num_keys):
        table[np.arange(n), permute(np.arange(n), n, derive_key(seed, 0))] += 1
    chi_square = ((table - num_keys / n) ** 2 / (num_keys / n)).sum(axis=1)
    assert chi_square.max() < n - 1 + 5 * math.sqrt(2 * (n - 1)) + 5


def test_neighbours_are_torn_apart_and_keys_are_unrelated() -> None:
    place = np.arange(10_000)
    first, second = (permute(place, 10_000, derive_key(0, epoch)) for epoch in (0, 1))
    pairs = [(place, first), (place, second), (first[:-1], first[1:]), (first, second)]
    assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.05 for one, other in pairs)


def test_keys_take_any_integer_and_keep_the_order_of_their_parts() -> None:
    keys = {derive_key(*parts) for parts in [(0,), (-1,), (2**70 + 5,), (1, 2), (2, 1), (0, 0)]}
    assert len(keys) == 6
    assert all(0 <= key < 2**64 for key in keys)
