"""Index arithmetic from tensors cut in one way to tensors cut in another. No torch here.

A checkpoint of a model that was split over ranks holds boxes of its tensors. A reader that wants
another box (a rank of another layout, or one rank that wants all) takes the overlaps:

    saved   [ a a a | b b b ]        2 boxes of 3
    wanted  [ x x | y y | z z ]      3 boxes of 2:  x from a, y from a and b, z from b

A checkpoint of sharded state holds runs of elements instead, cut anywhere within rows. Boxes are
matched with boxes in the tensor's dimensions; as soon as one side is a run, both are matched in the
order of elements, where a box is several runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
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
    """First index of the box, for each dimension."""
    shape: tuple[int, ...]
    """Length of the box, for each dimension."""

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
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return _slices(self.start, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPiece:
    """A run of a whole tensor's elements, row after row.

    Raises:
        CheckpointError: it does not lie inside the whole.
    """

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """First element."""
    end: int
    """Element behind the last one."""

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= prod(self.whole):
            raise CheckpointError(f"elements {self.begin} to {self.end} in {self.whole}")

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return self.end - self.begin

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds it."""
        return (self.numel,)


AnyPiece = Piece | FlatPiece


def whole_piece(shape: Sequence[int]) -> Piece:
    """The piece that covers a whole tensor of this shape."""
    return Piece(whole=tuple(shape), start=(0,) * len(shape), shape=tuple(shape))


def nth_piece(shape: Sequence[int], dim: int | None, index: int, count: int) -> Piece:
    """Part `index` of `count` equal parts along `dim`.

    Args:
        shape: of the whole tensor.
        dim: dimension to cut; None returns the whole tensor.
        index: which part, from 0.
        count: number of parts.

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


def piece_of_run(shape: Sequence[int], begin: int, end: int) -> AnyPiece:
    """A run of a tensor's elements: whole rows as a box, others as a run.

    Args:
        shape: of the whole tensor.
        begin: first element.
        end: element behind the last one.
    """
    if (begin, end) == (0, prod(shape)):
        return whole_piece(shape)
    row = prod(shape[1:])
    if not row or begin % row or end % row:
        return FlatPiece(whole=tuple(shape), begin=begin, end=end)
    rows, start = (end - begin) // row, (begin // row, *(0 for _ in shape[1:]))
    return Piece(whole=tuple(shape), start=start, shape=(rows, *shape[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """`wanted[target] = saved[index][source]`."""

    index: int
    """Index of the saved piece."""
    source: tuple[slice, ...]
    """Region of the saved piece, in that piece's coordinates."""
    target: tuple[slice, ...]
    """Region of the wanted piece, in that piece's coordinates."""
    flat: bool = False
    """True when both regions are of flattened pieces."""


def plan_reshard(saved: Sequence[AnyPiece], wanted: AnyPiece) -> list[Copy]:
    """Plan the copies that fill `wanted` from `saved`.

    Raises:
        CheckpointError: pieces of tensors of another shape, pieces that overlap, or pieces that do
            not fill it exactly.
    """
    for piece in saved:
        if piece.whole != wanted.whole:
            raise CheckpointError(f"a piece of {piece.whole}, expected one of {wanted.whole}")
    boxes = [piece for piece in saved if isinstance(piece, Piece)]
    if isinstance(wanted, Piece) and len(boxes) == len(saved):
        return _plan_boxes(boxes, wanted)
    return _plan_runs(saved, wanted)


def _plan_boxes(saved: Sequence[Piece], wanted: Piece) -> list[Copy]:
    copies, filled, found = [], 0, []
    for index, piece in enumerate(saved):
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
        found.append(spans)
    _check_filled(filled, wanted)
    _check_disjoint(found, wanted)
    return copies


def _plan_runs(saved: Sequence[AnyPiece], wanted: AnyPiece) -> list[Copy]:
    """Plan in the order of the whole tensor's elements."""
    runs = sorted(
        (first, first + length, index, offset)
        for index, piece in enumerate(saved)
        for first, length, offset in _runs(piece)
    )
    for before, after in pairwise(runs):
        if after[0] < before[1]:
            raise CheckpointError(f"pieces overlap at element {after[0]} of {wanted.whole}")
    ends = [end for _, end, _, _ in runs]
    copies, filled = [], 0
    for first, length, offset in _runs(wanted):
        last, at = first + length, bisect_right(ends, first)
        while at < len(runs) and runs[at][0] < last:
            begin, end, index, inside = runs[at]
            low, high = max(begin, first), min(end, last)
            source = slice(inside + low - begin, inside + high - begin)
            target = slice(offset + low - first, offset + high - first)
            copies.append(Copy(index=index, source=(source,), target=(target,), flat=True))
            filled += high - low
            at += 1
    _check_filled(filled, wanted)
    return copies


def _runs(piece: AnyPiece) -> list[tuple[int, int, int]]:
    """First element in the whole, length, and first element in the piece, for each of its runs."""
    if not piece.numel:
        return []
    if isinstance(piece, FlatPiece):
        return [(piece.begin, piece.numel, 0)]
    # Behind the last dimension that is cut, rows are adjacent.
    cut = max((d for d, n in enumerate(piece.whole) if piece.shape[d] != n), default=0)
    strides = [prod(piece.whole[d + 1 :]) for d in range(len(piece.whole))]
    length = prod(piece.shape[cut:])
    first = sum(start * stride for start, stride in zip(piece.start, strides, strict=True))
    steps = product(*(range(n) for n in piece.shape[:cut]))
    return [
        (first + sum(i * s for i, s in zip(at, strides[:cut], strict=True)), length, k * length)
        for k, at in enumerate(steps)
    ]


def _check_filled(filled: int, wanted: AnyPiece) -> None:
    if filled != wanted.numel:
        start = wanted.start if isinstance(wanted, Piece) else wanted.begin
        raise CheckpointError(
            f"pieces hold {filled} of the {wanted.numel} elements at {start} of shape "
            f"{wanted.shape} in {wanted.whole}"
        )


def _check_disjoint(boxes: list[list[tuple[int, int]]], wanted: Piece) -> None:
    """Refuse boxes, given by their spans, that overlap; a sweep along the first dimension."""
    active: list[list[tuple[int, int]]] = []
    for box in sorted(boxes):
        active = [other for other in active if other[0][1] > box[0][0]]
        for other in active:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                raise CheckpointError(f"pieces overlap in {wanted.whole}")
        active.append(box)


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
