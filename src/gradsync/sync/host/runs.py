"""Division of a flat buffer among ranks: index arithmetic only, without torch.

    parameters  [ p2 ................................ | . p0 ....... | . p1 .. ]
    blocks      [ 65,536 | 65,536 | rest              | p0           | p1      ]   never span two
    runs        [ 65,536 | 65,536 | rest .................. small ones together ]
    shares      [ rank 0          | rank 1                                      ]   whole blocks

Blocks are those of the clipping norm ([Note: Fixed blocks] in clip.py), so the rank that owns one
takes its norm alone. They begin at multiples of 64 elements inside of their parameter, where a
fused optimizer gives the same bits for a piece as for the whole. A run is processed at once: it
fits into a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsync.sync.engine.plan import Slot

BLOCK = 65_536
"""Elements; equal to `clip.BLOCK`."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one parameter."""

    index: int
    """Index of the parameter."""
    number: int
    """Index of the block in its parameter."""
    start: int
    """First element in the flat buffer."""
    stop: int
    """Element behind the last one."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, with the padding between them."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


def blocks_of(slots: Sequence[Slot]) -> list[Block]:
    """Cut every slot into blocks; a parameter without elements has none."""
    return [
        Block(slot.index, number, start, min(start + BLOCK, slot.offset + slot.numel))
        for slot in slots
        for number, start in enumerate(range(slot.offset, slot.offset + slot.numel, BLOCK))
    ]


def share_blocks(blocks: Sequence[Block], world_size: int) -> list[list[Block]]:
    """Blocks of each rank: consecutive, cut where the sizes are closest to equal."""
    if not blocks:
        return [[] for _ in range(world_size)]
    edges = [block.start for block in blocks] + [blocks[-1].stop]
    total, cuts = edges[-1], [0]
    for rank in range(1, world_size):
        wanted = total * rank / world_size
        nearest = min(range(cuts[-1], len(edges)), key=lambda i: abs(edges[i] - wanted))
        cuts.append(nearest)
    cuts.append(len(blocks))
    return [list(blocks[cuts[rank] : cuts[rank + 1]]) for rank in range(world_size)]


def runs_of(blocks: Sequence[Block]) -> Iterator[Run]:
    """Group consecutive blocks until a run has about `BLOCK` elements."""
    gathered: list[Block] = []
    for block in blocks:
        if gathered and block.stop - gathered[0].start > BLOCK:
            yield Run(gathered[0].start, gathered[-1].stop, tuple(gathered))
            gathered = []
        gathered.append(block)
    if gathered:
        yield Run(gathered[0].start, gathered[-1].stop, tuple(gathered))
