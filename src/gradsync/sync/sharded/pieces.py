"""Parts of parameters that a rank owns: index arithmetic over a bucket plan, without torch.

bucket     [ p3 ........ | . p1 ...... | .. ]       `|` cuts it into one shard per rank
rank 0       p3[0:512]
rank 1       p3[512:700], p1[0:320]
rank 2       p1[320:325]
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.sync.engine.plan import BucketPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of elements of one parameter that lies in one shard."""

    index: int
    """Index of the parameter."""
    start: int
    """First element in the flattened parameter; a multiple of 64."""
    stop: int
    """Element behind the last one."""
    offset: int
    """Place of the first element in the shard."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def pieces_of(plan: BucketPlan, rank: int, world_size: int) -> tuple[Piece, ...]:
    """The parts of `plan`'s parameters in the shard of `rank`, in slot order, without padding.

    A parameter without elements has no piece here, see `empty_pieces_of`.

    Args:
        plan: the bucket.
        rank: owner of the shard.
        world_size: number of shards, one a rank.
    """
    shard = plan.shard(rank, world_size)
    pieces = []
    for slot in plan.slots:
        first = max(slot.offset, shard.start)
        behind = min(slot.offset + slot.numel, shard.stop)
        if first < behind:
            pieces.append(
                Piece(
                    index=slot.index,
                    start=first - slot.offset,
                    stop=behind - slot.offset,
                    offset=first - shard.start,
                )
            )
    return tuple(pieces)


def empty_pieces_of(plan: BucketPlan, rank: int) -> tuple[Piece, ...]:
    """Pieces of parameters without elements, on rank 0: their state still counts steps."""
    return tuple(
        Piece(index=slot.index, start=0, stop=0, offset=0)
        for slot in plan.slots
        if slot.numel == 0 and rank == 0
    )
