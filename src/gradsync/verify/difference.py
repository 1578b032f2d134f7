"""How far two sets of tensors lie apart: absolutely, relatively, and in units in the last place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass(slots=True)
class Difference:
    """The largest over everything that was compared; grows by `include`."""

    max_abs: float = 0.0
    """Largest absolute difference of two elements."""
    max_rel: float = 0.0
    """Largest absolute difference, over the largest magnitude in the reference's tensor."""
    max_ulp: int = 0
    """Largest number of representable values between two elements."""
    bitwise: bool = True
    """No difference at all, signs of zeros included."""
    first_step: int | None = None
    """First step in which anything differs."""
    first_name: str = ""
    """What differs there, first in the model's order."""

    def include(
        self, step: int, got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
    ) -> None:
        """Compare two sets of tensors of one step; a tensor that only one side has counts as
        zeros on the other."""
        for name in dict.fromkeys([*expected, *got]):
            a, b = got.get(name), expected.get(name)
            if a is None and b is None:
                continue
            absolute, relative, ulp, equal = compare(a, b)
            self.max_abs = max(self.max_abs, absolute)
            self.max_rel = max(self.max_rel, relative)
            self.max_ulp = max(self.max_ulp, ulp)
            if not equal:
                self._note(step, name)

    def include_number(self, step: int, name: str, got: float, expected: float) -> None:
        """The same for one fp64 number of a step."""
        self.include(
            step,
            {name: torch.tensor(got, dtype=torch.float64)},
            {name: torch.tensor(expected, dtype=torch.float64)},
        )

    def _note(self, step: int, name: str) -> None:
        self.bitwise = False
        if self.first_step is None:
            self.first_step, self.first_name = step, name


def compare(got: Tensor | None, expected: Tensor | None) -> tuple[float, float, int, bool]:
    """(absolute, relative, ulp, same bits) of two tensors; a missing one counts as zeros.

    A number that is not finite on one side only is infinitely far away.
    """
    one = got if got is not None else expected
    assert one is not None
    a = torch.zeros_like(one) if got is None else got
    b = torch.zeros_like(one) if expected is None else expected
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf"), float("inf"), 2**62, False
    if not a.dtype.is_floating_point:
        return _compare_exact(a, b)
    equal = got is not None and expected is not None and _same_bits(a, b)
    if equal or not a.numel():
        return 0.0, 0.0, 0, equal
    distance = (a.double() - b.double()).abs()
    distance = torch.where(_same_value(a, b), 0.0, distance)
    distance = torch.nan_to_num(distance, nan=float("inf"), posinf=float("inf"))
    absolute = float(distance.max())
    scale = float(torch.nan_to_num(b.double().abs(), nan=0.0, posinf=0.0).max())
    relative = absolute / scale if scale else (0.0 if absolute == 0 else float("inf"))
    return absolute, relative, max_ulp(a, b), equal


def max_ulp(a: Tensor, b: Tensor) -> int:
    """Largest number of steps from one representable value to the next between two elements.

    Bit patterns of one sign are ordered like the numbers; across zero the two distances from it
    add up (0.0 and -0.0 are the same number). Saturates at 2^63 - 1.
    """
    if not a.numel():
        return 0
    below_sign = 2 ** (8 * a.element_size() - 1) - 1
    x, y = (t.contiguous().view(_INTEGER[t.dtype]).long() for t in (a, b))
    from_zero_x, from_zero_y = x & below_sign, y & below_sign
    limit = 2**63 - 1
    across = torch.where(from_zero_x > limit - from_zero_y, limit, from_zero_x + from_zero_y)
    return int(torch.where((x < 0) == (y < 0), (from_zero_x - from_zero_y).abs(), across).max())


def _compare_exact(a: Tensor, b: Tensor) -> tuple[float, float, int, bool]:
    distance = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    return distance, distance, int(distance), torch.equal(a, b)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if bool((a.isnan() & b.isnan()).all()):
        return True
    kind = _INTEGER[a.dtype]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _same_value(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())
