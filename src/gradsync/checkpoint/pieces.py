"""Tensors in pieces, one file per rank, in checkpoints of split models and of sharded state.

    part-00000-of-00002   model/embed.weight           optimizer/exp_avg/embed.weight  …
    part-00001-of-00002   model/blocks.1.mlp.up.weight …

A part file holds one rank's pieces of every kind; the manifest records the place of each piece in
its whole tensor: a box of a split model's tensor, or a run of elements of sharded state, cut
anywhere within rows. Joined, they equal the contents of a whole model's checkpoint. Any number of
ranks, cut in any way, takes its part from that. No torch before tensors are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from gradsync.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PART = "part-"
"""Prefix of a file of parts; other files hold whole tensors."""
Places = Mapping[str, Mapping[str, Any]]
"""The tensors of one file: name -> {"whole": shape of the whole tensor, "start": first index of
a box in each dimension}, or "flat": [begin, end) in place of "start", a run of its elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPiece:
    """A box of a whole tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor; () for a single number."""
    start: tuple[int, ...]
    """First index of the box, for each dimension."""
    shape: tuple[int, ...]
    """Length of the box, for each dimension."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPiece:
    """Elements `begin .. end-1` of a whole tensor in row-major order."""

    whole: tuple[int, ...]
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved tensor."""
        return (self.end - self.begin,)


AnyPiece = SavedPiece | FlatPiece


def whole_piece(shape: Sequence[int]) -> SavedPiece:
    """The piece that covers a whole tensor of this shape."""
    return SavedPiece(whole=tuple(shape), start=(0,) * len(shape), shape=tuple(shape))


def nth_piece(shape: Sequence[int], dim: int | None, index: int, count: int) -> SavedPiece:
    """Part `index` of `count` equal parts of a tensor along `dim`, or all of it if `dim` is None;
    CheckpointError if `count` does not divide the dimension."""
    if dim is None:
        return whole_piece(shape)
    length, rest = divmod(shape[dim], count)
    if rest:
        raise CheckpointError(f"dimension {dim} of {tuple(shape)} has no {count} equal parts")
    cut, start = list(shape), [0] * len(shape)
    cut[dim], start[dim] = length, index * length
    return SavedPiece(whole=tuple(shape), start=tuple(start), shape=tuple(cut))


def piece_of_run(shape: Sequence[int], begin: int, end: int) -> AnyPiece:
    """Elements `begin .. end-1` of a tensor of this shape: whole rows as a box, others as a run."""
    if (begin, end) == (0, prod(shape)):
        return whole_piece(shape)
    row = prod(shape[1:])
    if not row or begin % row or end % row:
        return FlatPiece(whole=tuple(shape), begin=begin, end=end)
    rows, start = (end - begin) // row, (begin // row, *(0 for _ in shape[1:]))
    return SavedPiece(whole=tuple(shape), start=start, shape=(rows, *shape[1:]))


def join(name: str, pieces: Sequence[tuple[AnyPiece, Tensor]]) -> Tensor:
    """The whole tensor on the CPU; a piece that covers all of it is returned unchanged.

    CheckpointError if pieces are of tensors of several shapes, overlap, or leave a gap.
    """
    import torch

    whole = pieces[0][0].whole
    if other := [piece.whole for piece, _ in pieces if piece.whole != whole]:
        raise CheckpointError(f"tensor {name!r}: a piece of {other[0]}, expected one of {whole}")
    is_full = sum(tensor.numel() for _, tensor in pieces) == prod(whole)
    if is_full and len(pieces) == 1:
        return pieces[0][1].cpu().reshape(whole)
    joined = torch.empty(whole, dtype=pieces[0][1].dtype)
    taken = torch.zeros(whole, dtype=torch.bool)
    for piece, tensor in pieces:
        if isinstance(piece, FlatPiece):
            run = slice(piece.begin, piece.end)
            target, seen = joined.view(-1)[run], taken.view(-1)[run]
        else:
            target, seen = joined[piece.slices], taken[piece.slices]
        target.copy_(tensor)
        seen.fill_(True)
    if not is_full or not taken.all():
        raise CheckpointError(f"tensor {name!r}: pieces overlap, or leave a gap in {whole}")
    return joined


def part_stem(index: int, count: int) -> str:
    """Name of the file of part `index` of `count`, without its suffix."""
    return f"{PART}{index:05d}-of-{count:05d}"


@dataclass(eq=False)
class InOrder(Mapping[str, T]):
    """Values by name, each produced by `take(name)` when it is asked for: once, in order."""

    _names: Sequence[str]
    _take: Callable[[str], T]
    _taken: int = 0

    def __getitem__(self, name: str) -> T:
        assert name == self._names[self._taken], "each once, in order"
        self._taken += 1
        return self._take(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def places_of(pieces: Mapping[str, AnyPiece]) -> dict[str, dict[str, list[int]]]:
    """Places of the pieces in JSON form; a piece's shape is its tensor's."""
    return {
        name: {"whole": list(piece.whole), "flat": [piece.begin, piece.end]}
        if isinstance(piece, FlatPiece)
        else {"whole": list(piece.whole), "start": list(piece.start)}
        for name, piece in pieces.items()
    }


def join_files(
    files: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, Places]
) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by kind ("model", "optimizer") and name, on the CPU; CheckpointError if pieces
    are missing, unplaced, or do not fill their tensors."""
    found: dict[str, list[tuple[AnyPiece, Tensor]]] = {}
    for stem, tensors in files.items():
        for name, tensor in tensors.items():
            found.setdefault(name, []).append((_piece(stem, name, tensor, places), tensor))
    whole: dict[str, dict[str, Tensor]] = {}
    for name, pieces in found.items():
        kind, _, rest = name.partition("/")
        whole.setdefault(kind, {})[rest] = join(name, pieces)
    return whole


def _piece(stem: str, name: str, tensor: Tensor, places: Mapping[str, Places]) -> AnyPiece:
    try:
        place = places[stem][name]
        whole = tuple(place["whole"])
        if "flat" not in place:
            return SavedPiece(whole=whole, start=tuple(place["start"]), shape=tuple(tensor.shape))
        begin, end = place["flat"]
        return FlatPiece(whole=whole, begin=begin, end=end)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{stem}: tensor {name!r} has no place") from None
