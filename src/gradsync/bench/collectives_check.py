"""Whether an algorithm's result is right: equality, over numbers whose sums are exact.

Each rank has its own sequence of small integers, of prime length, repeated over the tensor: a part
that ends up in a wrong place, or a rank that is missing or counted twice, shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LENGTH = 65_521
"""The largest prime below 2**16."""
_MOST = 127
"""No sum may exceed it: int8 ends there, and bfloat16 is exact up to 256."""


class Patterns:
    """The numbers that ranks bring, and the results that they should get.

    Args:
        rank: this one.
        world_size: number of ranks; sums are exact up to 127 of them.
        dtype: of all tensors.
        device: of all tensors.
    """

    def __init__(
        self, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rank, self._world_size = rank, world_size
        highest = max(min(_MOST // world_size, 4), 1)
        tiles = [
            torch.randint(highest + 1, (_LENGTH,), generator=torch.Generator().manual_seed(seed))
            for seed in range(world_size)
        ]
        self._tiles = [tile.to(device, dtype) for tile in tiles]
        self._sum = torch.stack(tiles).sum(0).to(device, dtype)

    def fill(self, source: Tensor, result: Tensor) -> None:
        """This rank's numbers into `source`, and before that nonsense into `result`, so that an
        operation that does nothing is found out. Both [n] of any length; they may overlap."""
        result.fill_(-1)
        _repeat(self._tiles[self._rank], source)

    def first_wrong(self, operation: str, result: Tensor) -> int:
        """Index of the first wrong element of this rank's `result`, or -1."""
        if operation == "all_gather":
            parts = result.view(self._world_size, -1)
            for rank, part in enumerate(parts):
                found = _first_difference(self._tiles[rank], part, 0)
                if found >= 0:
                    return rank * parts.shape[1] + found
            return -1
        if operation == "broadcast":
            return _first_difference(self._tiles[0], result, 0)
        start = self._rank * len(result) if operation == "reduce_scatter" else 0
        return _first_difference(self._sum, result, start)


def _repeat(tile: Tensor, target: Tensor) -> None:
    for piece in target.split(len(tile)):
        piece.copy_(tile[: len(piece)])


def _first_difference(tile: Tensor, found: Tensor, start: int) -> int:
    """Where [n] differs from the repeated tile from `start` on; -1 for nowhere."""
    turned = tile.roll(-(start % len(tile)))
    for number, piece in enumerate(found.split(len(tile))):
        expected = turned[: len(piece)]
        if not torch.equal(piece, expected):
            return number * len(tile) + int((piece != expected).nonzero()[0])
    return -1
