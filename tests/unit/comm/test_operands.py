"""Which tensors hold nan or inf."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm.finite import non_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_one_value_is_found(dtype: torch.dtype, value: float) -> None:
    bad = torch.ones(3, 4, dtype=dtype).t()
    bad[2, 1] = value
    assert non_finite([("good", torch.ones(2, dtype=dtype)), ("bad", bad)]) == "bad"


def test_large_values_are_finite() -> None:
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert torch.isinf(largest.norm())
    assert non_finite([("w", largest), ("none", torch.empty(0)), ("n", torch.tensor([1]))]) == ""
    assert non_finite([]) == ""


def test_three_are_named_and_all_are_counted() -> None:
    bad = torch.tensor(float("nan"))
    assert non_finite((name, bad) for name in "abc") == "a, b, c"
    assert non_finite((name, bad) for name in "abcda") == "a, b, c, … (4 tensors)"
