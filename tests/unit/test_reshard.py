"""Tensors cut in one way, wanted in another: nothing is lost, nothing comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.checkpoint.reshard import Piece, nth_piece, plan_reshard, whole_piece
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


def fill(wanted: Piece, saved: Sequence[Piece], parts: Sequence[np.ndarray]) -> np.ndarray:
    found = np.full(wanted.shape, -1)
    for copy in plan_reshard(saved, wanted):
        assert (found[copy.target] == -1).all(), "an element came twice"
        found[copy.target] = parts[copy.index][copy.source]
    return found


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
