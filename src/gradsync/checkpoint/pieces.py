"""Tensors in pieces, one file per rank, in checkpoints of split models and of sharded state.

    part-00000-of-00002   model/embed.weight           optimizer/exp_avg/embed.weight  …
    part-00001-of-00002   model/blocks.1.mlp.up.weight …

Such a file holds the pieces that one rank has of every kind; the manifest records the place of each
piece in its whole tensor. Joined, they equal the contents of a whole model's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.reshard import AnyPiece, FlatPiece, Piece, plan_reshard, whole_piece
from gradsync.errors import CheckpointError

Places = Mapping[str, Mapping[str, Any]]
"""The tensors of one file: name -> {"whole": shape of the whole tensor, "start": first index of
a box in each dimension}, or "flat": [begin, end) in place of "start", a run of its elements."""


def part_stem(index: int, count: int) -> str:
    """Name of the file of part `index` of `count`, without its suffix."""
    return f"part-{index:05d}-of-{count:05d}"


def is_part(stem: str) -> bool:
    """Whether a file holds parts, not whole tensors."""
    return stem.startswith("part-")


class PartFiles(Mapping[str, Mapping[str, Tensor]]):
    """Files that are read one after the other and then forgotten.

    Their tensors may be `ArrivingTensors`.

    Args:
        stems: names of the files, requested in this order.
        contents: tensors of each file.
    """

    def __init__(self, stems: Sequence[str], contents: Iterator[Mapping[str, Tensor]]) -> None:
        self._stems, self._contents = tuple(stems), contents
        self._taken = 0

    def __getitem__(self, stem: str) -> Mapping[str, Tensor]:
        assert stem == self._stems[self._taken], "each file once, in order"
        self._taken += 1
        return next(self._contents)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stems)

    def __len__(self) -> int:
        return len(self._stems)


def places_of(pieces: Mapping[str, AnyPiece]) -> dict[str, dict[str, list[int]]]:
    """Places of the pieces in JSON form; a piece's shape is its tensor's."""
    return {name: _place(piece) for name, piece in pieces.items()}


def _place(piece: AnyPiece) -> dict[str, list[int]]:
    if isinstance(piece, FlatPiece):
        return {"whole": list(piece.whole), "flat": [piece.begin, piece.end]}
    return {"whole": list(piece.whole), "start": list(piece.start)}


def join_files(
    files: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, Places]
) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by kind ("model", "optimizer") and name, on the CPU.

    Raises:
        CheckpointError: pieces are missing, unplaced, or do not fill their tensors.
    """
    found: dict[str, list[tuple[AnyPiece, Tensor]]] = {}
    for stem, tensors in files.items():
        for name, tensor in tensors.items():
            found.setdefault(name, []).append((_piece(stem, name, tensor, places), tensor))
    whole: dict[str, dict[str, Tensor]] = {}
    for name, pieces in found.items():
        kind, _, rest = name.partition("/")
        whole.setdefault(kind, {})[rest] = join(name, pieces)
    return whole


def join(name: str, pieces: Sequence[tuple[AnyPiece, Tensor]]) -> Tensor:
    """Join pieces on the CPU; a piece that covers the whole tensor is returned as it is.

    Raises:
        CheckpointError: see `join_files`.
    """
    boxes = [piece for piece, _ in pieces]
    wanted = whole_piece(boxes[0].whole)
    try:
        copies = plan_reshard(boxes, wanted)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from None
    if len(pieces) == 1:
        return pieces[0][1].cpu().reshape(wanted.shape)
    joined = torch.empty(wanted.shape, dtype=pieces[0][1].dtype)
    for copy in copies:
        source = pieces[copy.index][1]
        if copy.flat:
            joined.view(-1)[copy.target] = source.reshape(-1)[copy.source].cpu()
        else:
            joined[copy.target] = source[copy.source].cpu()
    return joined


def _piece(stem: str, name: str, tensor: Tensor, places: Mapping[str, Places]) -> AnyPiece:
    try:
        place = places[stem][name]
        whole = tuple(place["whole"])
        if "flat" not in place:
            return Piece(whole=whole, start=tuple(place["start"]), shape=tuple(tensor.shape))
        begin, end = place["flat"]
        piece = FlatPiece(whole=whole, begin=begin, end=end)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{stem}: tensor {name!r} has no place") from None
    if piece.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{stem}: tensor {name!r} has shape {tuple(tensor.shape)}, expected {piece.shape}"
        )
    return piece
