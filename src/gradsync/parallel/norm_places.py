"""Where each block's norm of each piece stands in the vector that ranks sum; pure, no torch.

The gradient's norm is the root of a sum of squares over fixed blocks (`sync/clip.py`). A rank of a
split model knows the blocks it owns. Each is written to its place in a vector of zeros, and the
sum over ranks is the vector of all of them: adding zeros is exact, so all ranks get one rank's
blocks in one rank's order, and without tensor shards one rank's norm, bit for bit.
"""

from __future__ import annotations

from math import prod

from gradsync.checkpoint.reshard import nth_piece
from gradsync.parallel.partition import Part


def norm_places(part: Part, block: int) -> tuple[dict[str, int], int]:
    """Where the norms of the parameters that `part` owns begin, by name; and how many there are.

    Args:
        part: this rank's.
        block: elements of a block.
    """
    owned, places, end = part.owned(), {}, 0
    for weight in part.weights:
        count = part.layout.tp if weight.divided is not None else 1
        for shard in range(count):
            piece = nth_piece(weight.shape, weight.divided, shard, count)
            if owned.get(weight.name) == piece:
                places[weight.name] = end
            end += -(-prod(piece.shape) // block)
    return places, end
