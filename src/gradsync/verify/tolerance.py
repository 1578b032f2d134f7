"""How far two results may lie apart, from arithmetic alone. No torch here.

[Note: Bounds]
Nothing here was fitted to a measurement, and nothing may be relaxed to pass.

Gradients. All ways of reducing add the same numbers g_0 … g_{L-1}, the gradients of the leaves,
only in another order. In floating point with unit roundoff u, a sum of n numbers in *any* order is
off by at most gamma_{n-1} sum |g_i| from the exact sum, gamma_k = k u / (1 - k u) (Higham 2002,
Accuracy and Stability of Numerical Algorithms, section 4.2). The mean takes up to four more
roundings (division by W inside the mechanism; the factor; its product), clipping four
(norm + 1e-6, the quotient, its rounding, the product). So against the sum of the leaves' gradients
in fp64, every element may differ by

    gamma_{L-1+4[+4]} x sum |g_i| / weight        (+ the smallest normal number: underflow)

where L counts the leaves that have a gradient, sums of zeros being exact. u = 2^-24 for fp32,
2^-53 for fp64. Under bf16 autocast the weights and their gradients are fp32, and so is u.
A lossy wire rounds each rank's sum and each partial sum once more, with its own u (2^-8 for bf16,
2^-11 for fp16): gamma_{W+1} of *that* u is added. In fp16 small numbers lose more: everything is
scaled so that the largest number M of a bucket lies within a factor of two of 65504 / W, and
subnormal numbers are 2^-24 apart; each of the W + 1 roundings costs up to 2^-25 2 W M / 65504,
less than W M 2^-39.

One step at a time. Gradients can be compared like this only at equal weights. So the run's own
weights before step k are handed to one rank, which computes every leaf's gradient anew; then the
optimizer is applied to the run's own gradient, and must give the run's weights after step k. When
every step is one rank's step up to rounding, so is the run; the distance between two free runs
(the *drift*) also measures how fast the model itself spreads small differences. It is reported
and has no bound, except for `bitwise`, where it must be zero.

Optimizer. Its step is elementwise, so the same bits are expected; pieces of a tensor may take
another code path (vector loops have scalar ends, with and without fused multiply-add). The
roundings of AdamW's and SGD's formulas are counted in `verify/update.py`.
"""

from __future__ import annotations

import math

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance between 1 and the next number."""
SMALLEST_NORMAL = {"fp64": 2.0**-1022, "fp32": 2.0**-126, "fp16": 2.0**-14, "bf16": 2.0**-126}
_DIVISION = 4
_CLIPPING = 4


def gamma(count: int, dtype: str) -> float:
    """`n u / (1 - n u)`: how far `count` roundings in a row may carry a result, relatively."""
    error = count * UNIT_ROUNDOFF[dtype]
    assert error < 1, f"{count} roundings in {dtype} may lose everything"
    return error / (1 - error)


def gradient_factor(num_leaves: int, dtype: str, *, clipped: bool) -> float:
    """Times `sum |g_i| / weight` it bounds the error of a mean gradient; see [Note: Bounds]."""
    return gamma(max(num_leaves - 1, 0) + _DIVISION + _CLIPPING * clipped, dtype)


def wire_factor(world_size: int, wire: str) -> float:
    """What a lossy wire may add to it: each rank's sum and each partial sum rounded once."""
    return gamma(world_size + 1, wire)


def wire_underflow(world_size: int, wire: str) -> float:
    """Times the largest magnitude, what small numbers on a wire may add; bf16 has fp32's range."""
    return (world_size + 1) * world_size * 2.0**-39 if wire == "fp16" else 0.0


def loss_factor(num_leaves: int) -> float:
    """Times `sum |loss_i| / weight`: losses are added and divided in fp64."""
    return gamma(num_leaves + 1, "fp64")


def norm_factor(num_elements: int, dtype: str) -> float:
    """Relative error of an L2 norm of `num_elements` numbers, summed in any order.

    Squares do not cancel, so it is gamma_n on the sum, halved by the root; the root, the product
    and one level of nesting are well inside of the other half. Beyond 1 / u elements the formula
    says nothing: infinity.
    """
    count = num_elements + 4
    return gamma(count, dtype) if count * UNIT_ROUNDOFF[dtype] < 1 else math.inf
