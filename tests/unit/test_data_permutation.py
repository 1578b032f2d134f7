import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.order import derive_key, permute


@pytest.mark.parametrize("key", [0, 1, derive_key(7, 3)])
def test_every_small_size_is_permuted_one_to_one(key: int) -> None:
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n)), n


@pytest.mark.parametrize("n", [4096, 4097, 65_535, 100_003, 2**17])
def test_large_sizes_are_permuted_one_to_one(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, 5)), np.arange(n))


@given(n=st.integers(2**40, 2**62), key=st.integers(0, 2**64 - 1))
def test_huge_sizes_stay_inside_and_distinct(n: int, key: int) -> None:
    positions = np.array([0, 1, 2, n // 2, n - 2, n - 1])
    values = permute(positions, n, key)
    assert values.min() >= 0
    assert values.max() < n
    assert len(set(values.tolist())) == len(positions)


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
    degrees = n - 1
    assert chi_square.max() < degrees + 5 * math.sqrt(2 * degrees) + 5


def test_neighbours_are_torn_apart_and_keys_are_unrelated() -> None:
    n = 10_000
    first, second = (permute(np.arange(n), n, derive_key(0, epoch)) for epoch in (0, 1))
    for order in (first, second):
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_keys_take_any_integer_and_keep_the_order_of_their_parts() -> None:
    keys = {derive_key(*parts) for parts in [(0,), (-1,), (2**70 + 5,), (1, 2), (2, 1), (0, 0)]}
    assert len(keys) == 6
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize(("position", "n"), [(5, 5), (-1, 5), (0, 0)])
def test_what_cannot_be_permuted_is_refused(position: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"permute|positions"):
        permute(np.array([position]), n, 0)
