"""Bounds hold where they must and are not so wide that a mistake fits into them."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gradsync.verify.exact import add_up, clip_factor, gradient_bounds, norm_bound, part_of_bound
from gradsync.verify.promise import Promise
from gradsync.verify.reference import LeafResult
from gradsync.verify.tolerance import UNIT_ROUNDOFF, gamma, gradient_factor, norm_factor

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
