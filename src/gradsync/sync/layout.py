"""Places of parameters in flat buckets, and the parts that ranks own. Pure, without torch.

    order      p3   p1   p0   p2            (the order in which backward finishes them)
    bucket 0 [ p3 . ]                       small: communication begins early
    bucket 1      [ p1 . p0 ...... ]        `.` is padding
    bucket 2                  [ p2 .. ]

Parameters start at multiples of 64 elements, and so does every part that a rank owns. Within a
parameter a fused optimizer then gives the same bits for a piece as for the whole, because its
vector loops end nowhere else (for 16-bit parameters and several threads see elementwise.py). A
bucket's length is a multiple of 64 x ranks, so that it can be cut into equal shards:

    shards     [ p3[0:512] | p3[512:700] . p1[0:320] | p1[320:325] .. ]      one per rank

Ranks that share memory get whole blocks instead. These are the blocks of the clipping norm
([Note: Fixed blocks] in replicas.py). Ranks process them run by run: a run fits into the cache.

    parameters [ p2 ................................ | . p0 ....... | . p1 .. ]
    blocks     [ 65,536 | 65,536 | rest              | p0           | p1      ]   never span two
    runs       [ 65,536 | 65,536 | rest .................. small ones together ]
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT = 64
"""Elements; parameters and shards start at multiples of it."""

BLOCK = 65_536
"""Elements of a block of the norm; a block never spans two parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Properties of a parameter that the plan depends on."""

    numel: int
    itemsize: int
    """Bytes of an element."""
    kind: Hashable
    """Dtype and device; only parameters of one kind share a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter, by its index, in a bucket."""

    index: int
    offset: int
    """First element in the bucket."""
    numel: int
    """Number of elements, without the padding after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """One bucket: slots in the order in which they are expected to fill."""

    slots: tuple[Slot, ...]
    numel: int
    """Length with padding, elements; a multiple of `ALIGNMENT` x ranks."""

    def shard(self, rank: int, world_size: int) -> range:
        """Elements that belong to `rank`: equal parts, in rank order."""
        part = self.numel // world_size
        return range(rank * part, (rank + 1) * part)


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],
    *,
    bucket_bytes: float,
    first_bucket_bytes: float | None = None,
    like_ddp: bool = False,
    world_size: int,
) -> tuple[BucketPlan, ...]:
    """Cut `order` into buckets, each closed as soon as it holds `bucket_bytes`.

    With `first_bucket_bytes`, buckets begin small so that communication begins early, and double up
    to `bucket_bytes`. Towards the end each takes half of what is left: less and less computation
    hides them, and the next forward needs them first. The last takes no more than it must.

    Args:
        items: every parameter.
        order: a permutation of the parameters' indices.
        bucket_bytes: 0 gives every parameter its own bucket, `inf` makes one per kind.
        first_bucket_bytes: size of the first bucket and of the last one; None: as the others.
        like_ddp: as in torch's DDP, only the first bucket is smaller.
        world_size: ranks that divide a bucket into shards.
    """
    assert sorted(order) == list(range(len(items))), "the order must name every parameter once"
    open_slots: dict[Hashable, list[Slot]] = {}
    plans: list[BucketPlan] = []
    least = limit = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    graded = first_bucket_bytes is not None and not like_ddp
    sizes = [items[index].numel * items[index].itemsize for index in order]
    last = len(sizes) if graded else 0  # where the last bucket begins, which holds `least`
    while graded and last and sum(sizes[last:]) < least:
        last -= 1
    left = sum(sizes[:last]) if graded else math.inf
    for place, index in enumerate(order):
        item = items[index]
        if place == last:
            plans += [_close(slots, world_size) for slots in open_slots.values()]
            open_slots.clear()
        slots = open_slots.setdefault(item.kind, [])
        end = slots[-1].offset + slots[-1].numel if slots else 0
        start = -(-end // ALIGNMENT) * ALIGNMENT
        slots.append(Slot(index=index, offset=start, numel=item.numel))
        held = (start + item.numel) * item.itemsize
        if held >= min(limit, max(least, left / 2)) and left - held >= least:
            plans.append(_close(open_slots.pop(item.kind), world_size))
            limit = min(2 * limit, bucket_bytes) if graded else bucket_bytes
            left -= held
    plans += [_close(slots, world_size) for slots in open_slots.values()]
    return tuple(plans)


def _close(slots: list[Slot], world_size: int) -> BucketPlan:
    used = slots[-1].offset + slots[-1].numel
    multiple = ALIGNMENT * world_size
    return BucketPlan(slots=tuple(slots), numel=max(math.ceil(used / multiple), 1) * multiple)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive elements of one parameter, by its index, that a rank owns."""

    index: int
    start: int
    """First element in the flattened parameter; a multiple of 64."""
    stop: int
    """Element after the last one."""
    offset: int
    """Place of the first element in the shard, or in the ranks' flat buffer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def pieces_of_shard(plan: BucketPlan, rank: int, world_size: int) -> list[Piece]:
    """The parts of `plan`'s parameters in the shard of `rank`, in slot order, without padding.

    Parameters without elements belong to rank 0, because their state still counts steps.
    """
    shard = plan.shard(rank, world_size)
    pieces = []
    for slot in plan.slots:
        first = max(slot.offset, shard.start)
        behind = min(slot.offset + slot.numel, shard.stop)
        if first < behind:
            start, stop = first - slot.offset, behind - slot.offset
            place = first - shard.start
            pieces.append(Piece(index=slot.index, start=start, stop=stop, offset=place))
        elif not slot.numel and rank == 0:
            pieces.append(Piece(index=slot.index, start=0, stop=0, offset=0))
    return pieces


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """A block of one parameter, with its place in the flat buffer."""

    index: int
    """Index of the parameter."""
    number: int
    """Index of the block in its parameter."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, with the padding between them."""

    start: int
    stop: int
    blocks: tuple[ParameterBlock, ...]


def blocks_of(slots: Sequence[Slot]) -> list[ParameterBlock]:
    """Cut every slot into blocks; a parameter without elements has none."""
    return [
        ParameterBlock(slot.index, number, start, min(start + BLOCK, slot.offset + slot.numel))
        for slot in slots
        for number, start in enumerate(range(slot.offset, slot.offset + slot.numel, BLOCK))
    ]


def share_blocks(blocks: Sequence[ParameterBlock], world_size: int) -> list[list[ParameterBlock]]:
    """Blocks of each rank: consecutive, cut at the points that make sizes most equal."""
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


def runs_of(blocks: Sequence[ParameterBlock]) -> Iterator[Run]:
    """Group consecutive blocks until a run has about `BLOCK` elements."""
    gathered: list[ParameterBlock] = []
    for block in blocks:
        if gathered and block.stop - gathered[0].start > BLOCK:
            yield Run(gathered[0].start, gathered[-1].stop, tuple(gathered))
            gathered = []
        gathered.append(block)
    if gathered:
        yield Run(gathered[0].start, gathered[-1].stop, tuple(gathered))


def pieces_of_blocks(blocks: Sequence[ParameterBlock]) -> list[Piece]:
    """Join a rank's blocks into one piece per parameter; `offset` is in the flat buffer."""
    found = []
    for index, group in groupby(blocks, key=lambda block: block.index):
        own = list(group)
        start, offset = own[0].number * BLOCK, own[0].start
        stop = start + own[-1].stop - offset
        found.append(Piece(index=index, start=start, stop=stop, offset=offset))
    return found
