"""Tensors cut in one way, wanted in another: nothing is lost, nothing comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.checkpoint.reshard import (
    AnyPiece,
    FlatPiece,
    Piece,
    nth_piece,
    piece_of_run,
    plan_reshard,
    whole_piece,
)
from gradsync.errors import CheckpointError


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece], list[Piece]]:
    """A shape, and two ways to cut it into boxes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, draw(boxes(shape)), draw(boxes(shape))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Piece]:
    """`shape` cut along one dimension, at any places."""
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    edges = [0, *sorted(inner), size]
    found = []
    for first, last in pairwise(edges):
        start, length = [0] * len(shape), list(shape)
        start[dim], length[dim] = first, last - first
        found.append(Piece(whole=shape, start=tuple(start), shape=tuple(length)))
    return draw(st.permutations(found))


@settings(max_examples=50)
@given(cuts())
def test_any_cut_becomes_any_other(
    cut: tuple[tuple[int, ...], list[Piece], list[Piece]],
) -> None:
    shape, saved, wanted = cut
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = [whole[piece.slices] for piece in saved]
    for piece in wanted:
        np.testing.assert_array_equal(fill(piece, saved, parts), whole[piece.slices])


def fill(wanted: AnyPiece, saved: Sequence[AnyPiece], parts: Sequence[np.ndarray]) -> np.ndarray:
    found = np.full(wanted.shape, -1)
    for copy in plan_reshard(saved, wanted):
        source = parts[copy.index].reshape(-1) if copy.flat else parts[copy.index]
        target = found.reshape(-1) if copy.flat else found
        assert (target[copy.target] == -1).all(), "an element came twice"
        target[copy.target] = source[copy.source]
    return found


@st.composite
def runs(draw: st.DrawFn, shape: tuple[int, ...]) -> list[AnyPiece]:
    """`shape` cut between any elements; whole rows are boxes, and some runs are empty."""
    size = int(np.prod(shape))
    edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=4))), size]
    as_boxes = draw(st.booleans())
    found = [
        piece_of_run(shape, first, last)
        if as_boxes
        else FlatPiece(whole=shape, begin=first, end=last)
        for first, last in pairwise(edges)
    ]
    return draw(st.permutations(found))


@st.composite
def mixed_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[AnyPiece], list[AnyPiece]]:
    """A shape, and two ways to cut it into boxes or runs of elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ways = st.one_of(boxes(shape), runs(shape))
    return shape, draw(ways), draw(ways)


def part(piece: AnyPiece, whole: np.ndarray) -> np.ndarray:
    if isinstance(piece, FlatPiece):
        return whole.reshape(-1)[piece.begin : piece.end]
    return whole[piece.slices]


@settings(max_examples=150)
@given(mixed_cuts())
def test_boxes_and_runs_become_each_other(
    cut: tuple[tuple[int, ...], list[AnyPiece], list[AnyPiece]],
) -> None:
    shape, saved, wanted = cut
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = [part(piece, whole) for piece in saved]
    for piece in wanted:
        np.testing.assert_array_equal(fill(piece, saved, parts), part(piece, whole))


@settings(max_examples=100)
@given(mixed_cuts(), st.data())
def test_holes_and_overlaps_are_refused(
    cut: tuple[tuple[int, ...], list[AnyPiece], list[AnyPiece]], data: st.DataObject
) -> None:
    """A piece that is missing, one that comes twice, and both at once."""
    shape, saved, _ = cut
    full = [piece for piece in saved if piece.numel]
    one = data.draw(st.sampled_from(full))
    with pytest.raises(CheckpointError, match="hold"):
        plan_reshard([piece for piece in full if piece is not one], whole_piece(shape))
    with pytest.raises(CheckpointError, match=r"hold|overlap"):
        plan_reshard([*full, one], whole_piece(shape))


def test_an_overlap_that_hides_a_hole_is_refused() -> None:
    rows = [nth_piece((4, 2), 0, index, 4) for index in range(4)]
    with pytest.raises(CheckpointError, match=r"overlap in \(4, 2\)"):
        plan_reshard([rows[0], rows[1], rows[1], rows[3]], whole_piece((4, 2)))
    flat = [FlatPiece(whole=(4, 2), begin=first, end=first + 3) for first in (0, 2, 5)]
    with pytest.raises(CheckpointError, match="overlap at element 2"):
        plan_reshard(flat, whole_piece((4, 2)))


def test_runs_of_whole_rows_are_boxes() -> None:
    assert piece_of_run((4, 3), 3, 9) == Piece(whole=(4, 3), start=(1, 0), shape=(2, 3))
    assert piece_of_run((4, 3), 3, 8) == FlatPiece(whole=(4, 3), begin=3, end=8)
    assert piece_of_run((4,), 1, 2) == Piece(whole=(4,), start=(1,), shape=(1,))
    for shape, numel in (((), 1), ((2, 3), 6), ((0, 3), 0), ((3, 0), 0)):
        assert piece_of_run(shape, 0, numel) == whole_piece(shape)
    with pytest.raises(CheckpointError, match="elements 5 to 13 in"):
        piece_of_run((4, 3), 5, 13)
    with pytest.raises(CheckpointError, match="elements -1 to 2 in"):
        FlatPiece(whole=(4, 3), begin=-1, end=2)


def test_a_number_is_whole() -> None:
    assert plan_reshard([whole_piece(())], whole_piece(()))[0].source == ()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([nth_piece((4, 2), 0, 0, 2)], "hold 4 of the 8 elements"),
        ([whole_piece((4, 2)), nth_piece((4, 2), 0, 1, 2)], "hold 12 of the 8 elements"),
        ([whole_piece((2, 4))], r"a piece of \(2, 4\), expected one of \(4, 2\)"),
        ([], "hold 0 of the 8"),
    ],
)
def test_pieces_that_do_not_fill(saved: list[Piece], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_reshard(saved, whole_piece((4, 2)))


def test_pieces_lie_inside() -> None:
    with pytest.raises(CheckpointError, match="a piece at"):
        Piece(whole=(4,), start=(3,), shape=(2,))
    with pytest.raises(CheckpointError, match="a piece at"):
        Piece(whole=(4,), start=(-1,), shape=(2,))
    with pytest.raises(CheckpointError, match="a piece at"):
        Piece(whole=(4, 4), start=(0,), shape=(4,))
    with pytest.raises(CheckpointError, match="no 3 equal parts"):
        nth_piece((4, 3), 0, 0, 3)
