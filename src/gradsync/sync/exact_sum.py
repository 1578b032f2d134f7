"""Sums whose bits depend on neither order nor grouping, unlike those of floating point.

They serve the purpose of Shewchuk's exact sums (`math.fsum`), and can be taken over ranks.

[Note: Fixed bins] For single numbers: below 2^200 a number is cut into its multiples of 2^170, the
remaining multiples of 2^140, and so on down to 2^-220; anything smaller is dropped. A part is an
integer of 30 bits on the scale of its bin, so up to 2^23 of them add without rounding in float64,
here or by an all-reduce. Only the sum of the bins rounds, equally on all ranks. One message is
enough: no scale has to be agreed on first. (Demmel and Nguyen 2013, "Fast reproducible
floating-point summation".)

[Note: Sums without an order] For many elements, where 15 bins each would be much to send: per
element all ranks agree on the largest exponent, every value becomes an integer of at most
62 - log2(most) bits on that scale, and the integers are added, wherever they are. For up to 512
leaves that is at least as fine as float64 for the largest value. An element with an infinite or
undefined value sums to nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator

if TYPE_CHECKING:
    from torch import Tensor

_LIMIT = 2.0**200
_UNITS = tuple(2.0**exponent for exponent in range(170, -221, -30))
NUM_BINS = len(_UNITS) + 1
"""The last one adds, unchanged, numbers of 2^200 and more, infinite and undefined ones."""
_NOTHING = -2000
"""Exponent of 0: below those of all float64 numbers."""
_NOT_FINITE = 5000
"""Exponent of inf and nan: above all others."""


def to_bins(values: Tensor) -> Tensor:
    """The sum of `values` (float64 [L]) in bins, float64 [NUM_BINS]; does not wait."""
    units = torch.tensor(_UNITS, dtype=torch.float64, device=values.device)
    inside = values.abs() < _LIMIT
    # [L, bins]: a value without its bits below each unit; powers of two scale exactly.
    cut = (values.where(inside, 0.0)[:, None] / units).trunc() * units
    parts = cut.diff(dim=1, prepend=torch.zeros_like(cut[:, :1]))
    rest = values.where(~inside, 0.0)
    return torch.cat([parts.sum(0), rest.sum()[None]])


def from_bins(bins: Sequence[float]) -> float:
    """The sum, rounded once, of bins that were added up anywhere."""
    *ordinary, rest = bins
    return math.fsum(ordinary) + rest


def exact_sum(
    values: Tensor, jumps: Tensor, comm: Communicator, *, most: int
) -> tuple[Tensor, Tensor]:
    """Sum `values` over leaves and ranks ([Note: Sums without an order]), and take the largest of
    `jumps`, on all ranks.

    Two all-reduces over the whole group, int64 [n + m] and int64 [n]; nothing overlaps them.

    Args:
        values: float64 [L, n], L >= 1; a rank without leaves gives zeros.
        jumps: int64 [L, m]; the smallest int64 stands for none.
        comm: the ranks.
        most: largest number of values that any element has over all ranks.

    Returns:
        float64 [n] and int64 [m].
    """
    num_values = values.shape[1]
    exponents = torch.frexp(values).exponent.long().masked_fill(values == 0, _NOTHING)
    exponents = exponents.masked_fill(~values.isfinite(), _NOT_FINITE)
    largest = torch.cat([exponents.amax(0), jumps.amax(0)])
    comm.all_reduce(largest, "max").wait()
    exponent, largest_jump = largest[:num_values], largest[num_values:]
    bits = 62 - math.ceil(math.log2(max(most, 1)))
    shift = bits - exponent.clamp(-900, 1024)
    scaled = torch.where(values.isfinite(), values, 0.0) * _power_of_two(shift)
    total = scaled.round().long().sum(0)
    comm.all_reduce(total, "sum").wait()
    sums = total.double() * _power_of_two(-shift)
    return sums.masked_fill(exponent == _NOT_FINITE, math.nan), largest_jump


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0 ** exponent, exactly, from its bits; float64, exponent in -1022 .. 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
