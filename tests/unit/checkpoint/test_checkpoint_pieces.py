"""Tensors cut in one way are joined whatever the cut: nothing is lost, nothing comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsync.checkpoint.pieces import (
    AnyPiece,
    FlatPiece,
    SavedPiece,
    join,
    nth_piece,
    piece_of_run,
    whole_piece,
)
from gradsync.errors import CheckpointError

Cut = tuple[tuple[int, ...], list[AnyPiece]]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """A shape, cut into boxes along one dimension or between any elements, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    way = draw(st.sampled_from(["box", "run", "rows as boxes"]))
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim] if way == "box" else prod(shape)
    edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=4))), size]
    found: list[AnyPiece] = []
    for first, last in pairwise(edges):
        if way == "box":
            start, length = [0] * len(shape), list(shape)
            start[dim], length[dim] = first, last - first
            found.append(SavedPiece(whole=shape, start=tuple(start), shape=tuple(length)))
        elif way == "run":
            found.append(FlatPiece(whole=shape, begin=first, end=last))
        else:
            found.append(piece_of_run(shape, first, last))
    return shape, draw(st.permutations(found))


def contents(pieces: Sequence[AnyPiece], whole: Tensor) -> list[tuple[AnyPiece, Tensor]]:
    return [
        (p, whole.view(-1)[p.begin : p.end] if isinstance(p, FlatPiece) else whole[p.slices])
        for p in pieces
    ]


@given(cuts())
def test_any_cut_is_joined(cut: Cut) -> None:
    shape, pieces = cut
    whole = torch.arange(prod(shape)).view(shape)
    assert torch.equal(join("w", contents(pieces, whole)), whole)


@given(cuts(), st.data())
def test_holes_and_overlaps_are_refused(cut: Cut, data: st.DataObject) -> None:
    """A piece that is missing, one that comes twice, and one in the place of another."""
    shape, pieces = cut
    whole = torch.zeros(shape)
    full = [piece for piece in pieces if prod(piece.shape)]
    one, other = data.draw(st.sampled_from(full)), data.draw(st.sampled_from(full))
    rest = [piece for piece in full if piece is not one]
    wrong = [rest] if rest else []
    wrong.append([*full, one])
    if one is not other and one.shape == other.shape:
        wrong.append([*rest, other])
    for some in wrong:
        with pytest.raises(CheckpointError, match="'w': pieces overlap, or leave a gap"):
            join("w", contents(some, whole))


def test_pieces_of_another_tensor_are_refused() -> None:
    halves = [nth_piece((4, 2), 0, 0, 2), nth_piece((2, 4), 0, 1, 2)]
    with pytest.raises(CheckpointError, match=r"a piece of \(2, 4\), expected one of \(4, 2\)"):
        join("w", [(piece, torch.zeros(piece.shape)) for piece in halves])


def test_a_number_is_whole() -> None:
    assert join("step", [(whole_piece(()), torch.tensor(7.0))]) == 7.0


def test_runs_of_whole_rows_are_boxes() -> None:
    assert piece_of_run((4, 3), 3, 9) == SavedPiece(whole=(4, 3), start=(1, 0), shape=(2, 3))
    assert piece_of_run((4, 3), 3, 8) == FlatPiece(whole=(4, 3), begin=3, end=8)
    assert piece_of_run((4,), 1, 2) == SavedPiece(whole=(4,), start=(1,), shape=(1,))
    for shape, numel in (((), 1), ((2, 3), 6), ((0, 3), 0), ((3, 0), 0)):
        assert piece_of_run(shape, 0, numel) == whole_piece(shape)


def test_parts_are_equal() -> None:
    with pytest.raises(CheckpointError, match="no 3 equal parts"):
        nth_piece((4, 3), 0, 0, 3)
