"""The mean gradient as it should be: leaves' gradients summed in fp64, and its error bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.verify.promise import Promise
from gradsync.verify.reference import LeafResult
from gradsync.verify.tolerance import (
    SMALLEST_NORMAL,
    gradient_factor,
    loss_factor,
    norm_factor,
    wire_factor,
    wire_underflow,
)

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Exact:
    """Sums over leaves, in fp64."""

    total: dict[str, Tensor]
    """Sum of the leaves' gradients."""
    magnitude: dict[str, Tensor]
    """Sum of their absolute values."""
    terms: dict[str, int]
    """How many leaves have one."""
    dtype: dict[str, str]
    """In which the run adds them."""
    weight: float
    """Targets."""
    loss: float
    """Mean loss."""
    loss_bound: float
    """How far the mean loss may be off."""

    def mean(self, name: str) -> Tensor:
        """The exact mean gradient of one parameter."""
        return self.total[name] / self.weight

    def norm(self) -> float:
        """L2 norm of the exact mean gradient."""
        return math.sqrt(sum(float(t.square().sum()) for t in self.total.values())) / self.weight


def add_up(results: Sequence[LeafResult]) -> Exact:
    """The sums of some leaves (all of a step, or those of one rank)."""
    total: dict[str, Tensor] = {}
    magnitude: dict[str, Tensor] = {}
    terms: dict[str, int] = {}
    dtype: dict[str, str] = {}
    for result in results:
        for name, gradient in result.gradient.items():
            wide = gradient.double()
            total[name] = total[name] + wide if name in total else wide
            size = wide.abs()
            magnitude[name] = magnitude[name] + size if name in magnitude else size
            terms[name] = terms.get(name, 0) + 1
            dtype[name] = DTYPE_NAMES[gradient.dtype]
    weight = float(sum(result.weight for result in results))
    losses = [result.loss_sum for result in results]
    size = math.fsum(map(abs, losses))
    return Exact(
        total=total,
        magnitude=magnitude,
        terms=terms,
        dtype=dtype,
        weight=weight,
        loss=math.fsum(losses) / weight if weight else math.nan,
        loss_bound=loss_factor(len(losses)) * size / weight if weight else math.nan,
    )


def clip_factor(norm: float | None, clip_norm: float | None) -> float:
    """What clipping multiplies gradients by, given the norm that the run saw."""
    if norm is None or clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (norm + _CLIP_EPS))


def gradient_bounds(
    exact: Exact, promise: Promise, world_size: int, *, clipped: bool
) -> dict[str, Tensor]:
    """Largest error of each element of the mean gradient before clipping, fp64."""
    bounds = {}
    largest = max((float(t.max()) for t in exact.magnitude.values() if t.numel()), default=0.0)
    for name, size in exact.magnitude.items():
        factor = gradient_factor(exact.terms[name], exact.dtype[name], clipped=clipped)
        extra = 0.0
        if promise.wire and world_size > 1:
            factor += wire_factor(world_size, promise.wire)
            extra = wire_underflow(world_size, promise.wire) * largest
        bounds[name] = (factor * size + extra) / exact.weight + SMALLEST_NORMAL[exact.dtype[name]]
    return bounds


def part_of_bound(got: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Largest |got - expected| / bound; above 1 it cannot be rounding. nan counts as infinity."""
    if not got.numel():
        return 0.0
    part = (got.double() - expected).abs() / bound
    return float(torch.nan_to_num(part, nan=math.inf, posinf=math.inf).max())


def norm_bound(exact: Exact, bounds: Mapping[str, Tensor]) -> float:
    """How far the norm before clipping may be off, absolutely."""
    norm = exact.norm()
    elements = sum(t.numel() for t in exact.total.values())
    dtype = next(iter(exact.dtype.values()), "fp32")
    # |a + e| <= |a| + |e|: the errors of the elements move the norm by at most their own norm.
    moved = math.sqrt(sum(float(b.square().sum()) for b in bounds.values()))
    return norm_factor(elements, dtype) * (norm + moved) + moved
