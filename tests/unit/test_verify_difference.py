"""Differences in absolute, relative and last-place terms, against numpy's own spacing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradsync.verify.difference import Difference, compare, max_ulp

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_apart(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    for towards in (2.0, 0.0):
        next_one = torch.nextafter(one, torch.full_like(one, towards))
        assert max_ulp(one, next_one) == 1
        assert max_ulp(next_one, one) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_across_zero_both_distances_count(dtype: torch.dtype) -> None:
    zero = torch.zeros(1, dtype=dtype)
    smallest = torch.nextafter(zero, zero + 1)
    assert max_ulp(zero, -zero) == 0
    assert max_ulp(smallest, -smallest) == 2
    assert max_ulp(zero + 1, zero - 1) > 2


def test_the_widest_distance_saturates() -> None:
    assert max_ulp(torch.tensor([1e308]).double(), torch.tensor([-1e308]).double()) == 2**63 - 1


def test_ulps_agree_with_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1000, generator=generator)
    b = a * (1 + 1e-6)
    spacing = np.spacing(np.minimum(np.abs(a.numpy()), np.abs(b.numpy())))
    expected = (np.abs(a.numpy() - b.numpy()) / spacing).max()
    assert expected / 2 <= max_ulp(a, b) <= expected + 1


def test_relative_is_to_the_largest_element() -> None:
    absolute, relative, _, equal = compare(torch.tensor([1.0, 4.0]), torch.tensor([1.5, 8.0]))
    assert (absolute, relative, equal) == (4.0, 0.5, False)


def test_a_missing_tensor_counts_as_zeros_but_is_not_equal() -> None:
    assert compare(None, torch.tensor([0.0, 3.0]))[:2] == (3.0, 1.0)
    assert compare(torch.zeros(2), None) == (0.0, 0.0, 0, False)


def test_what_is_not_finite_is_infinitely_far() -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert compare(nan, one)[0] == math.inf
    assert compare(nan, nan) == (0.0, 0.0, 0, True)
    assert compare(torch.tensor([math.inf]), one)[0] == math.inf


def test_signed_zeros_have_other_bits() -> None:
    assert compare(torch.tensor([0.0]), torch.tensor([-0.0])) == (0.0, 0.0, 0, False)


def test_shapes_and_dtypes_must_agree() -> None:
    assert not compare(torch.ones(2), torch.ones(3))[3]
    assert not compare(torch.ones(2), torch.ones(2).double())[3]


def test_the_first_step_and_name_are_kept() -> None:
    found = Difference()
    found.include(0, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert found.bitwise
    found.include(1, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": None})
    found.include(2, {"a": torch.zeros(1)}, {"a": torch.ones(1)})
    assert (found.first_step, found.first_name, found.bitwise) == (1, "b", False)
    assert found.max_abs == 1.0


def test_numbers() -> None:
    found = Difference()
    found.include_number(0, "loss", 1.0, 1.0)
    found.include_number(1, "loss", 1.0 + 2**-52, 1.0)
    assert (found.max_ulp, found.first_step) == (1, 1)
