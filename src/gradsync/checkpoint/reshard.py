"""From tensors cut in one way to tensors cut in another: index maths alone. No torch here.

A checkpoint of a model that was split over ranks holds boxes of its tensors. Whoever wants another
box (a rank of another layout, or one rank that wants all) takes what overlaps:

    saved   [ a a a | b b b ]        2 boxes of 3
    wanted  [ x x | y y | z z ]      3 boxes of 2:  x from a, y from a and b, z from b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gradsync.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a whole tensor.

    Raises:
        CheckpointError: it does not lie inside the whole.
    """

    whole: tuple[int, ...]
    """Shape of the whole tensor; () for a single number."""
    start: tuple[int, ...]
    """Where the box begins, for each dimension."""
    shape: tuple[int, ...]
    """How long it is, for each dimension."""

    def __post_init__(self) -> None:
        sides = (self.whole, self.start, self.shape)
        equal = len({len(side) for side in sides}) == 1
        if not equal or any(
            not 0 <= first <= first + length <= size
            for size, first, length in zip(*sides, strict=True)
        ):
            raise CheckpointError(f"a piece at {self.start} of shape {self.shape} in {self.whole}")

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True when nothing is missing."""
        return self.shape == self.whole

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box, as an index into the whole tensor."""
        return _slices(self.start, self.shape)


def whole_piece(shape: Sequence[int]) -> Piece:
    """A tensor of this shape that is not cut."""
    return Piece(whole=tuple(shape), start=(0,) * len(shape), shape=tuple(shape))


def nth_piece(shape: Sequence[int], dim: int | None, index: int, count: int) -> Piece:
    """Part `index` of `count` equal ones along `dim`; None does not cut.

    Raises:
        CheckpointError: `count` does not divide the dimension.
    """
    if dim is None:
        return whole_piece(shape)
    length, rest = divmod(shape[dim], count)
    if rest:
        raise CheckpointError(f"dimension {dim} of {tuple(shape)} has no {count} equal parts")
    cut, start = list(shape), [0] * len(shape)
    cut[dim], start[dim] = length, index * length
    return Piece(whole=tuple(shape), start=tuple(start), shape=tuple(cut))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """`wanted[target] = saved[index][source]`."""

    index: int
    """Which of the saved pieces."""
    source: tuple[slice, ...]
    """The part of it, in its own coordinates."""
    target: tuple[slice, ...]
    """Where that goes, in the wanted piece's coordinates."""


def plan_reshard(saved: Sequence[Piece], wanted: Piece) -> list[Copy]:
    """How to fill `wanted` from `saved`, which do not overlap each other.

    Raises:
        CheckpointError: pieces of tensors of another shape, or they do not fill it exactly.
    """
    copies, filled = [], 0
    for index, piece in enumerate(saved):
        if piece.whole != wanted.whole:
            raise CheckpointError(f"a piece of {piece.whole}, expected one of {wanted.whole}")
        ends = zip(piece.start, piece.shape, wanted.start, wanted.shape, strict=True)
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
        if any(first >= last for first, last in spans):
            continue
        shape = [last - first for first, last in spans]
        inside = [first - a for (first, _), a in zip(spans, piece.start, strict=True)]
        place = [first - b for (first, _), b in zip(spans, wanted.start, strict=True)]
        copies.append(
            Copy(index=index, source=_slices(inside, shape), target=_slices(place, shape))
        )
        filled += prod(shape)
    if filled != wanted.numel:
        raise CheckpointError(
            f"pieces hold {filled} of the {wanted.numel} elements at {wanted.start} of shape "
            f"{wanted.shape} in {wanted.whole}"
        )
    return copies


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
