"""Differences against numpy's own spacing; bounds that hold, and that no mistake fits into."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from gradsync.verify.compare import (
    UNIT_ROUNDOFF,
    Difference,
    add_up,
    clip_factor,
    compare,
    gamma,
    gradient_bounds,
    gradient_factor,
    max_ulp,
    norm_bound,
    norm_factor,
    part_of_bound,
)
from gradsync.verify.plan import Promise
from gradsync.verify.reference import LeafResult

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


FP32 = Promise()


def leaves(count: int, seed: int = 0) -> list[LeafResult]:
    """Gradients with much cancellation, and weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    return [
        LeafResult(
            index=index,
            weight=1.0 + index,
            loss_sum=float(index),
            gradient={"w": torch.randn(500, generator=generator) * 10.0 ** (index % 3)},
            buffers={},
        )
        for index in range(count)
    ]


def test_unit_roundoff_is_torchs() -> None:
    names = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
    for name, dtype in (names | {"bf16": torch.bfloat16}).items():
        assert UNIT_ROUNDOFF[name] == torch.finfo(dtype).eps / 2


def test_gamma() -> None:
    assert gamma(1, "fp32") == pytest.approx(2.0**-24, rel=1e-6)
    assert gamma(100, "fp32") > 100 * 2.0**-24


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_any_order_of_sums_stays_inside(count: int, clip_norm: float | None) -> None:
    results = leaves(count)
    exact = add_up(results)
    bounds = gradient_bounds(exact, FP32, 4, clipped=clip_norm is not None)
    worst = 0.0
    for seed in range(20):
        order = list(results)
        random.Random(seed).shuffle(order)
        total = torch.zeros(500)
        for result in order:
            total = total + result.gradient["w"]
        mean = (total / 4) * (4 / exact.weight)  # as a mechanism does that averages over ranks
        norm = float(mean.norm()) if clip_norm is not None else None
        if clip_norm is not None:
            mean = mean * min(1.0, clip_norm / (float(mean.norm()) + 1e-6))
            assert abs(float(norm or 0) - exact.norm()) <= norm_bound(exact, bounds)
        factor = clip_factor(norm, clip_norm)
        part = part_of_bound(mean, exact.mean("w") * factor, bounds["w"] * factor)
        worst = max(worst, part)
    assert worst <= 1.0
    assert worst > 0.01 or count == 1  # a single leaf is exact


@pytest.mark.parametrize("mistake", ["a leaf missing", "in bf16", "weight off by one", "nan"])
def test_mistakes_lie_outside(mistake: str) -> None:
    results = leaves(5)
    exact = add_up(results)
    total = torch.zeros(500)
    for result in results[1:] if mistake == "a leaf missing" else results:
        gradient = result.gradient["w"]
        total += gradient.bfloat16().float() if mistake == "in bf16" else gradient
    mean = total / (exact.weight + (mistake == "weight off by one"))
    if mistake == "nan":
        mean[3] = math.nan
    bounds = gradient_bounds(exact, FP32, 2, clipped=False)
    assert part_of_bound(mean, exact.mean("w"), bounds["w"]) > 100


@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_wire_has_its_own_bound(wire: str, dtype: torch.dtype) -> None:
    results = leaves(4)
    exact = add_up(results)
    parts = [sum(r.gradient["w"] for r in results[i : i + 2]) for i in (0, 2)]
    scale = 64.0 if wire == "fp16" else 1.0
    total = sum((torch.as_tensor(part) * scale).to(dtype) for part in parts)
    mean = torch.as_tensor(total).float() / scale / exact.weight
    wide = gradient_bounds(exact, Promise(kind="lossy", wire=wire), 2, clipped=False)
    narrow = gradient_bounds(exact, FP32, 2, clipped=False)
    assert part_of_bound(mean, exact.mean("w"), wide["w"]) <= 1.0
    assert part_of_bound(mean, exact.mean("w"), narrow["w"]) > 10
    alone = gradient_bounds(exact, Promise(kind="lossy", wire=wire), 1, clipped=False)
    assert torch.equal(alone["w"], narrow["w"])  # one rank sends nothing


def test_losses_are_added_in_fp64() -> None:
    exact = add_up(leaves(5))
    assert exact.loss == sum(range(5)) / exact.weight
    assert 0 < exact.loss_bound < 1e-14


def test_more_leaves_may_be_further_off() -> None:
    assert gradient_factor(5, "fp32", clipped=False) < gradient_factor(6, "fp32", clipped=False)
    assert gradient_factor(5, "fp32", clipped=False) < gradient_factor(5, "fp32", clipped=True)


def test_the_norm_of_very_many_numbers_has_no_bound() -> None:
    assert norm_factor(1000, "fp32") < 1e-4
    assert norm_factor(2**24, "fp32") == math.inf


def test_clipping_only_shrinks() -> None:
    assert clip_factor(None, 1.0) == clip_factor(5.0, None) == clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5, rel=1e-6)
