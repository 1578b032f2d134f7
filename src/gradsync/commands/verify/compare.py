"""Distances between two results, and bounds that follow from arithmetic alone (derived in
docs/guide/verifying.md). Nothing here was fitted, and nothing may be relaxed to pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.tensor_file import tensor_bytes
from gradsync.commands.verify.record import DTYPE_NAMES, Tensors
from gradsync.commands.verify.reference import MicroBatchResult
from gradsync.commands.verify.settings import CLIP_NORM, Promise

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance between 1 and the next number."""
SMALLEST_NORMAL = {"fp64": 2.0**-1022, "fp32": 2.0**-126, "fp16": 2.0**-14, "bf16": 2.0**-126}
# Roundings, counted in the guide.
_DIVISION, _CLIPPING = 4, 4
_ADAM_MEAN, _ADAM_SQUARE, _ADAM_WEIGHT = 4, 5, 15


@dataclass(slots=True)
class Difference:
    """The largest difference over everything that was included."""

    max_abs: float = 0.0
    max_rel: float = 0.0  # over the largest magnitude in the reference's tensor
    bitwise: bool = True  # no difference at all, signs of zeros included
    first_step: int | None = None
    first_name: str = ""  # the tensor that differs there, first in the model's order

    def include(
        self, step: int, got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
    ) -> None:
        """Compare two sets of tensors of one step; see `compare`."""
        for name in dict.fromkeys([*expected, *got]):
            a, b = got.get(name), expected.get(name)
            if a is None and b is None:
                continue
            absolute, relative, equal = compare(a, b)
            self.max_abs = max(self.max_abs, absolute)
            self.max_rel = max(self.max_rel, relative)
            if not equal:
                self.bitwise = False
                if self.first_step is None:
                    self.first_step, self.first_name = step, name


def compare(got: Tensor | None, expected: Tensor | None) -> tuple[float, float, bool]:
    """(absolute, relative, same bits) of two tensors; a missing one counts as zeros.

    A number that is not finite on one side only is infinitely far away.
    """
    one = got if got is not None else expected
    assert one is not None
    a = torch.zeros_like(one) if got is None else got
    b = torch.zeros_like(one) if expected is None else expected
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, math.inf, False
    both_nan = a.isnan() & b.isnan()
    same_bits = bool(both_nan.all()) or tensor_bytes(a) == tensor_bytes(b)
    equal = got is not None and expected is not None and same_bits
    if equal or not a.numel():
        return 0.0, 0.0, equal
    distance = torch.where((a == b) | both_nan, 0.0, (a.double() - b.double()).abs())
    absolute = float(torch.nan_to_num(distance, nan=math.inf, posinf=math.inf).max())
    scale = float(torch.nan_to_num(b.double().abs(), nan=0.0, posinf=0.0).max())
    relative = absolute / scale if scale else (0.0 if absolute == 0 else math.inf)
    return absolute, relative, equal


def gamma(count: int, dtype: str) -> float:
    """`n u / (1 - n u)`: how far `count` successive roundings may move a result, relatively."""
    error = count * UNIT_ROUNDOFF[dtype]
    assert error < 1, f"{count} roundings in {dtype} may lose everything"
    return error / (1 - error)


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact mean gradient: sums over micro-batches, in fp64."""

    total: Tensors
    magnitude: Tensors  # sums of the gradients' absolute values
    terms: dict[str, int]  # number of micro-batches with a gradient
    dtype: dict[str, str]  # the dtype in which the run adds them
    weight: float  # number of targets
    loss_sum: float
    loss_sum_bound: float  # its largest error

    def means(self) -> Tensors:
        """The exact mean gradients."""
        return {name: total / self.weight for name, total in self.total.items()}

    def norm(self) -> float:
        """L2 norm of the exact mean gradient."""
        return _norm(self.total) / self.weight


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def add_up(results: Sequence[MicroBatchResult]) -> Exact:
    """Sum some micro-batches: all of a step, or those of one rank."""
    total, magnitude, terms, dtype = {}, {}, {}, {}
    for name in dict.fromkeys(name for result in results for name in result.gradient):
        found = [result.gradient[name] for result in results if name in result.gradient]
        total[name] = reduce(torch.add, (gradient.double() for gradient in found))
        magnitude[name] = reduce(torch.add, (gradient.double().abs() for gradient in found))
        terms[name], dtype[name] = len(found), DTYPE_NAMES[found[0].dtype]
    losses = [result.loss_sum for result in results]
    return Exact(
        total=total,
        magnitude=magnitude,
        terms=terms,
        dtype=dtype,
        weight=float(sum(result.weight for result in results)),
        loss_sum=math.fsum(losses),
        # Losses are added and divided in fp64.
        loss_sum_bound=gamma(len(losses) + 1, "fp64") * math.fsum(map(abs, losses)),
    )


def clip_factor(norm: float | None) -> float:
    """The factor by which clipping multiplies gradients, given the run's norm."""
    return 1.0 if norm is None else min(1.0, CLIP_NORM / (norm + 1e-6))


def gradient_bounds(exact: Exact, promise: Promise, world_size: int) -> dict[str, Tensor]:
    """Largest error of each element of the mean gradient before clipping, fp64."""
    on_wire = underflow = 0.0
    if promise.wire and world_size > 1 and not promise.same_bits:
        on_wire = gamma(world_size + 1, promise.wire)
        if promise.wire == "fp16":  # bf16 has fp32's range
            sizes = [float(size.max()) for size in exact.magnitude.values() if size.numel()]
            underflow = (world_size + 1) * world_size * 2.0**-39 * max(sizes, default=0.0)
    bounds = {}
    for name, size in exact.magnitude.items():
        dtype = exact.dtype[name]
        roundings = max(exact.terms[name] - 1, 0) + _DIVISION + _CLIPPING
        if promise.wire and promise.same_bits:  # once, and on each level of the tree
            levels = (exact.terms[name] - 1).bit_length() + 1
            on_wire = gamma(levels, promise.wire)
        factor = gamma(roundings, dtype) + on_wire
        bounds[name] = (factor * size + underflow) / exact.weight + SMALLEST_NORMAL[dtype]
    return bounds


def part_of_bound(got: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Largest |got - expected| / bound; above 1 it cannot be rounding. nan counts as infinity."""
    if not got.numel():
        return 0.0
    part = (got.double() - expected).abs() / bound
    return float(torch.nan_to_num(part, nan=math.inf, posinf=math.inf).max())


def norm_bound(exact: Exact, bounds: Mapping[str, Tensor]) -> float:
    """Largest error of the L2 norm before clipping, if squares are summed in any order.

    Squares do not cancel: gamma_n on the sum, halved by the root; the root, the product and one
    level of nesting fit in the other half. Beyond 1 / u elements the formula gives no bound.
    """
    count = sum(t.numel() for t in exact.total.values()) + 4
    dtype = next(iter(exact.dtype.values()), "fp32")
    factor = gamma(count, dtype) if count * UNIT_ROUNDOFF[dtype] < 1 else math.inf
    # |a + e| <= |a| + |e|: the errors of the elements move the norm by at most their own norm.
    moved = _norm(bounds)
    return factor * (exact.norm() + moved) + moved


def update_bounds(
    name: str,
    *,
    group: Mapping[str, Any],
    weight: Tensor,
    gradient: Tensor,
    before: Tensors,
    after: Tensors,
) -> dict[str, Tensor]:
    """Largest difference of weight ("") and each state tensor (its slot) of parameter `name` under
    AdamW, elementwise, fp64. `group` holds its settings, `before` and `after` its state."""
    dtype = DTYPE_NAMES[weight.dtype]
    w, g = weight.double().abs(), gradient.double().abs()
    tiny = SMALLEST_NORMAL[dtype]

    def old(slot: str) -> Tensor:
        found = before.get(f"{slot}/{name}")
        return torch.zeros_like(w) if found is None else found.double().abs()

    b1, b2 = group["betas"]
    m = b1 * old("exp_avg") + (1 - b1) * g
    v = b2 * old("exp_avg_sq") + (1 - b2) * g * g
    step = float(after[f"step/{name}"])
    root = (after[f"exp_avg_sq/{name}"].double() / (1 - b2**step)).sqrt() + group["eps"]
    quotient = group["lr"] / (1 - b1**step) * m / root
    return {
        "": gamma(_ADAM_WEIGHT, dtype) * (w + quotient) + tiny,
        "exp_avg": gamma(_ADAM_MEAN, dtype) * m + tiny,
        "exp_avg_sq": gamma(_ADAM_SQUARE, dtype) * v + tiny,
    }
