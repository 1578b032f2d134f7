"""The parts of parameters that this rank updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync.sync.host.flat import Flat
from gradsync.sync.host.weights import SharedWeights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive elements of one parameter."""

    index: int
    """Index of the parameter."""
    flat: int
    """Index of its flat."""
    group: int
    """Index of the optimizer's parameter group."""
    start: int
    """First element in the flat."""
    stop: int
    """Element behind the last one."""
    is_first: bool
    """Whether it begins where the parameter does."""
    tensor: Tensor
    """The elements, [stop - start]: a view of the weights."""
    state_is_shared: bool = False
    """Whether its optimizer state lies in shared memory already."""


def pieces_of(
    flats: Sequence[Flat], weights: Sequence[SharedWeights], group_of: Mapping[int, int]
) -> list[Piece]:
    """The pieces that this rank updates.

    Args:
        flats: their blocks assign elements to ranks.
        weights: of each flat.
        group_of: id of a parameter -> its group; parameters in none are left out.
    """
    pieces = []
    for number, (flat, home) in enumerate(zip(flats, weights, strict=True)):
        parameters = {
            slot.index: parameter
            for slot, parameter in zip(flat.slots, home.parameters, strict=True)
        }
        spans: dict[int, tuple[int, int, bool]] = {}
        for block in flat.blocks:
            start, _, is_first = spans.get(block.index, (block.start, 0, block.number == 0))
            spans[block.index] = (start, block.stop, is_first)
        pieces += [
            Piece(index, number, group, start, stop, is_first, home.memory[start:stop])
            for index, (start, stop, is_first) in spans.items()
            if (group := group_of.get(id(parameters[index]))) is not None
        ]
    return pieces
