"""Exact sums of single numbers: the same bits in any order and any grouping.

[Note: Limbs] Below 2^200 a number is cut into limbs: its multiples of 2^170, then the remaining
multiples of 2^140, and so on down to 2^-220; anything smaller is dropped. A limb is an integer of
30 bits on its scale, so up to 2^23 of them add without rounding in float64, here or by an
all-reduce. Only the sum of the limbs' sums rounds, equally on all ranks. One message is enough: no
scale has to be agreed on first. (Demmel and Nguyen 2013, "Fast reproducible floating-point
summation", with fixed bins.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 30
_LIMIT = 2.0**200
_UNITS = tuple(2.0**exponent for exponent in range(170, -221, -_BITS))
NUM_LIMBS = len(_UNITS) + 1
"""The last one adds, unchanged, numbers of 2^200 and more, infinite and undefined ones."""


def split(values: Tensor) -> Tensor:
    """The limbs of the sum of `values` (float64 [L]), float64 [NUM_LIMBS]; does not wait."""
    units = torch.tensor(_UNITS, dtype=torch.float64, device=values.device)
    inside = values.abs() < _LIMIT
    # [L, limbs]: a value without its bits below each unit; powers of two scale exactly.
    cut = (values.where(inside, 0.0)[:, None] / units).trunc() * units
    limbs = cut.diff(dim=1, prepend=torch.zeros_like(cut[:, :1]))
    rest = values.where(~inside, 0.0)
    return torch.cat([limbs.sum(0), rest.sum()[None]])


def join(limbs: Sequence[float]) -> float:
    """The sum, rounded once, of limbs that were added up anywhere."""
    *ordinary, rest = limbs
    return math.fsum(ordinary) + rest
