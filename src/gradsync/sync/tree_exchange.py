"""Sums over ranks along the fixed tree. Each shard's owner adds, then sends the sum to all ranks.

    rank 0  nodes of leaves 0 1 2 ─┐ slices of shard r    ┌─ rank r adds them    ─┐ shard r
    rank 1  nodes of leaves 3 4   ─┼─────────────────────►│  in tree order:      ─┼───► all ranks
    rank 2  nodes of leaves 5 6 7 ─┘ go to rank r         └─ (0,2)+..., see Note ─┘

With one node per rank (equal shares of 2^k leaves) a rank sends 2(W-1)/W of the bucket, exactly as
in a ring all-reduce. With uneven shares a rank has up to 2 log2(leaves) nodes, and in the first
half sends one slice for each. Messages go point to point on threads while backward runs, so they do
not interfere with the main thread's collectives.

The first half (slices to their owners, and the additions) can be requested separately, and the
second half later. late_update.py lets the next forward wait for the second half. Under `zero1`
(zero.py) owners update their shards first, so that weights go down in place of sums.

[Note: Two stages] With several hosts of equally many ranks, numbered host by host, a host's ranks
first add the nodes within the host's leaves (its largest nodes). Then ranks with the same place on
every host finish the tree for their shard, so that one of L ranks sends 1/L of the bytes.

[Note: Siblings] If n ranks, a power of two, have one node each and these form the tree's next
level, a stage goes up the tree itself. Partners at distance 1, 2, 4 ... exchange halves of the
region they have left and add them (recursive halving). The way down is the same for any power of
two of ranks. The bytes are the same, in log2(n) messages instead of n - 1. (Thakur et al. 2005,
"Optimization of collective communication operations in MPICH", distances in the tree's order.)

On the GPUs of one host a launch costs more than a byte. There the way up is one batch of slices
from each rank to each, added in few calls, and the way down is one all-gather, for which shards lie
in rank order. All additions are the tree's, so bits are the same everywhere.

Which rank owns which shard depends only on the number of ranks. It does not depend on their leaves,
which may differ between steps, because optimizer state belongs to shards.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator, Messenger, Work
from gradsync.comm.process_group import AllOf, Background, Done, ProcessGroupCommunicator
from gradsync.core.torch_private import foreach_add_
from gradsync.sync.buckets import (
    FORGOTTEN,
    UNKNOWN,
    Bucket,
    Node,
    Sums,
    at_once,
    checked_shares,
    largest_nodes,
    merges_of,
    root,
)
from gradsync.sync.layout import BLOCK, ParameterBlock, blocks_of
from gradsync.sync.reducer import Exchange
from gradsync.sync.replicas import norms_of_blocks, total_norm
from gradsync.sync.shares import Owners

if TYPE_CHECKING:
    from torch import Tensor


LANES = 2
"""Threads on CPUs, which take buckets in turn, so that the network does not wait while a bucket is
added up or the other rank is not yet ready to receive. Each has its own channel for messages."""
_PLAIN = (torch.float32, torch.float64)
"""Dtypes for which an all-reduce of two ranks computes a + b, rounded once, as the tree does."""


@dataclass(frozen=True, slots=True)
class TreeStage:
    """One round of additions: the nodes that ranks hold, and the nodes they compute."""

    comm: Messenger
    nodes: list[list[Node]]
    """Nodes held by each rank of `comm`, in leaf order."""
    wanted: list[Node]
    """Nodes that the owners of the shards compute."""
    siblings: bool
    """Whether sums go up the tree itself; see [Note: Siblings]."""


def shard_of(region: range, rank: int, ranks: int, *, in_order: bool = False) -> range:
    """The part of `region` whose sum `rank` gets, len(region) / ranks. If the number of ranks is a
    power of two, it is what repeated halving on the way up leaves, unless shards lie `in_order` of
    ranks."""
    bits = ranks.bit_length() - 1
    halves = ranks == 1 << bits and not in_order
    place = int(f"{rank:0{bits}b}"[::-1], 2) if halves else rank
    size = len(region) // ranks
    return region[place * size : (place + 1) * size]


def are_siblings(nodes: Sequence[Sequence[Node]]) -> bool:
    """Whether these are all nodes of one level below another node, one on each rank."""
    count, (level, first) = len(nodes), (nodes[0] or [(0, 1)])[0]
    below = [[(level, first + place)] for place in range(count)]
    return count & (count - 1) == 0 and first % count == 0 and list(nodes) == below


class TreeExchange(Exchange):
    """Sums along the tree; see the diagram at the top of the module.

    Args:
        comm: all ranks.
        levels: the communicators to use, `[comm]` or `[within the host, between hosts]`; ranks must
            be numbered host by host.
        device: device of the gradients.
        over_leaves: use the tree of all ranks' leaves; False: of ranks, with sums in any order.
        pair: a group of two ranks, only for whole sums; its all-reduce adds in the cache.
        gather: the ranks of the only level, in a group that only the lane uses; its all-gather
            sends sums down.
        made: communicators to close with this object.
    """

    def __init__(
        self,
        comm: Messenger,
        levels: Sequence[Messenger],
        device: torch.device,
        *,
        over_leaves: bool = True,
        pair: Communicator | None = None,
        gather: Communicator | None = None,
        made: Sequence[ProcessGroupCommunicator] = (),
    ) -> None:
        self.messenger, self._over_leaves, self._pair = comm, over_leaves, pair
        self._gather = gather
        self._levels = levels
        # If the number of ranks is a power of two, shards lie as repeated halving leaves them.
        self._in_order = gather is not None
        self.in_one_order = device.type == "cuda" or gather is not None
        """Whether the lane has a separate group, which runs messages in order (NCCL)."""
        lost, lanes = getattr(comm, "lost", None), 1 if self.in_one_order else LANES
        self._lanes = [Background(device, lost=lost) for _ in range(lanes)]
        self.made = [*self._lanes, *made]
        self._planned: Work = Done()
        self._num_buffers = 0
        self._indexed = False
        self._stages: list[TreeStage] = []
        self._told: list[tuple[int, int]] = []
        self._own = range(0)
        self._room: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}
        self.whole = True
        """Whether the step's buckets were launched whole, not by halves."""

    def begin(self, sums: Sums) -> None:
        """Exchange the ranks' numbers of leaves; see `Exchange.begin`."""
        self._num_buffers, first = sums.num_buffers, sums.first_index
        self._indexed = first is not None
        mine = (sums.num_micro_batches, UNKNOWN if first is None else first)
        if not self._over_leaves or self.messenger.world_size == 1:
            each = mine if self._over_leaves else (1, UNKNOWN)
            self._plan([each] * self.messenger.world_size)
        else:
            self._planned = self.submit("plan", lambda lane: self._plan(self._share(mine, lane)))

    def launch(self, bucket: Bucket, *, half: bool = False) -> Work:
        self.whole, number = not half, bucket.number
        buffers = [bucket.flat(place) for place in range(max(self._num_buffers, 1))]
        if half:
            return self.submit(f"in {number}", partial(self._reduce, buffers), number)
        if self.messenger.world_size == 1:
            self._reduce(buffers, 0)
            return Done()
        if self._pair is None:
            return self.submit(f"sum {number}", partial(self._reduce, buffers, whole=True), number)
        works: list[Work] = []
        # On one lane, since collectives need the same order on both ranks.
        works.append(self.submit(f"start {number}", partial(self._as_pair, works, bucket, buffers)))
        return AllOf(works)

    def gather(self, bucket: Bucket) -> Work:
        """Start the second half."""
        flat, number = bucket.flat(0), bucket.number
        return self.submit(f"out {number}", lambda lane: self._send_down(flat, lane), number)

    def owners(self) -> Owners:
        """All ranks in the order of their shards; their all-gather is the second half, of any
        dtype."""
        ranks, rank = self.messenger.world_size, self.messenger.rank
        turns = itertools.count()

        def all_gather(output: Tensor, shard: Tensor) -> Work:
            mine = self.owned(output.numel(), rank)
            output[mine.start : mine.stop].copy_(shard)
            return self.submit("out", lambda lane: self._send_down(output, lane), next(turns))

        return Owners(self.owned(ranks, rank).start, ranks, all_gather)

    def submit(self, name: str, fn: Callable[[int], None], number: int = 0) -> Work:
        """Run `fn(lane)` on a thread, under a `name` that profilers show. It may send messages by
        `messenger`, over the channel `lane`. All ranks submit in one order and with the same
        `number` each time, which selects the lane."""
        lane = number % len(self._lanes)

        def named() -> None:
            with record_function(name):
                fn(lane)

        return self._lanes[lane].submit(named)

    def owned(self, numel: int, rank: int) -> range:
        """Elements of a bucket of `numel` whose sum `rank` gets from the first half alone."""
        span, size = range(numel), self._levels[0].world_size
        for level, place in zip(self._levels, (rank % size, rank // size), strict=False):
            span = shard_of(span, place, level.world_size, in_order=self._in_order)
        return span

    def _share(self, mine: tuple[int, int], lane: int) -> list[tuple[int, int]]:
        """Every rank's (number of leaves, first leaf): int64 [2] from each rank to each, on the
        CPU, because on a GPU the numbers would arrive only after the last forward."""
        own = torch.tensor(mine)
        others = [rank for rank in range(self.messenger.world_size) if rank != self.messenger.rank]
        told = {rank: torch.zeros_like(own) for rank in others}  # no leaves, if it is aborted
        told[self.messenger.rank] = own
        self.messenger.exchange(
            [(own, rank) for rank in others], [(told[rank], rank) for rank in others], lane
        ).wait()
        return [tuple(told[rank].tolist()) for rank in range(self.messenger.world_size)]

    def _plan(self, told: list[tuple[int, int]]) -> None:
        if told == self._told:
            return
        if any(first == FORGOTTEN for _, first in told):
            self._stages, self._told = [], told
            return
        ranges, self._told = checked_shares(told), told
        self._own = ranges[self.messenger.rank]
        total = root(ranges[-1].stop)
        nodes = [largest_nodes(leaves) for leaves in ranges]
        if len(self._levels) == 1:
            siblings = are_siblings(nodes) and not self._in_order
            self._stages = [TreeStage(self._levels[0], nodes, [total], siblings)]
            return
        intra, inter = self._levels
        size = intra.world_size
        hosts = [
            range(ranges[first].start, ranges[first + size - 1].stop)
            for first in range(0, self.messenger.world_size, size)
        ]
        of_hosts = [largest_nodes(leaves) for leaves in hosts]
        inside = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        host = self.messenger.rank // size
        self._stages = [
            TreeStage(intra, inside[host], of_hosts[host], are_siblings(inside[host])),
            TreeStage(inter, of_hosts, [total], are_siblings(of_hosts)),
        ]

    def _as_pair(self, works: list[Work], bucket: Bucket, buffers: list[Tensor], _: int) -> None:
        """Give `works` an all-reduce if two ranks have one node each, because a + b is b + a."""
        siblings = bool(self._stages) and all(stage.siblings for stage in self._stages)
        if self._pair is None or not siblings or bucket.rounded or bucket.dtype not in _PLAIN:
            with record_function(f"sum {bucket.number}"):
                self._reduce(buffers, 0, whole=True)
        else:
            _put(self._own_nodes(buffers), buffers[0])
            # Both ranks, the bucket's [numel] and dtype; overlaps backward.
            works.append(self._pair.all_reduce(buffers[0]))

    def _own_nodes(self, buffers: list[Tensor]) -> list[Tensor]:
        """Values of this rank's nodes; without indices, every leaf still has a buffer."""
        values, own = buffers[: self._num_buffers], self._own
        leaves = [(0, leaf) for leaf in own]
        return values if self._indexed else _add(values, leaves, largest_nodes(own))

    def _reduce(self, buffers: list[Tensor], lane: int, *, whole: bool = False) -> None:
        """Add up; `buffers[0]` then holds this rank's shard of the sum, at its place, or the
        `whole` sum."""
        self._planned.wait()  # on another lane
        if not self._stages:
            return  # the step is discarded
        result, values = buffers[0], self._own_nodes(buffers)
        parts = [result]
        for stage in self._stages:
            climb = self._halve_add if stage.siblings else self._scatter_add
            values = climb(stage, values, parts[-1], lane)
            parts.append(self._shard(stage.comm, parts[-1], stage.comm.rank))
        _put(values, parts[-1])
        if whole:
            self._send_down(result, lane)

    def _send_down(self, result: Tensor, lane: int) -> None:
        """Give all ranks all shards of `result`, in place."""
        if self._gather is not None:
            # Whole group, [n / ranks] to [n], the bucket's dtype; overlaps backward.
            own = self._shard(self._gather, result, self._gather.rank)
            self._gather.all_gather(result, own).wait()
            return
        regions = [result]
        for level in self._levels[:-1]:
            regions.append(self._shard(level, regions[-1], level.rank))
        for level, region in zip(reversed(self._levels), reversed(regions), strict=True):
            _down(level, region, lane)

    def _scatter_add(
        self, stage: TreeStage, values: list[Tensor], region: Tensor, lane: int
    ) -> list[Tensor]:
        """Send every rank its shard of this rank's values; add up the slices of this rank's shard.

        Point to point, one slice [n / ranks] per node and pair of ranks, in the bucket's dtype;
        overlaps backward.

        Args:
            stage: nodes of each rank.
            values: values of this rank's nodes, each [n]; may be empty.
            region: the result's region, [n]; only its place, shape and dtype are used.
            lane: the channel.
        """
        comm, mine = stage.comm, stage.comm.rank
        own_part = self._shard(comm, region, mine)
        sends, receives, arrived = [], [], []
        others = sum(len(nodes) for rank, nodes in enumerate(stage.nodes) if rank != mine)
        rooms = iter(self._rooms(stage, own_part, others, lane))
        for rank, nodes in enumerate(stage.nodes):
            if rank == mine:
                arrived += [self._shard(comm, value, mine) for value in values]
                continue
            sends += [(self._shard(comm, value, rank), rank) for value in values]
            slices = [next(rooms) for _ in nodes]
            receives += [(piece, rank) for piece in slices]
            arrived += slices
        comm.exchange(sends, receives, lane).wait()
        nodes = [node for nodes_of_rank in stage.nodes for node in nodes_of_rank]
        return _add(arrived, nodes, stage.wanted)

    def _halve_add(
        self, stage: TreeStage, values: list[Tensor], _: Tensor, lane: int
    ) -> list[Tensor]:
        """Like `_scatter_add`, between siblings: messages of [n / 2], [n / 4] ... to one rank each,
        in the bucket's dtype; overlaps backward."""
        comm, kept = stage.comm, values[0]
        for partner, kept, other in _rounds(comm, values[0]):
            (got,) = self._rooms(stage, kept, 1, lane)
            comm.exchange([(other, partner)], [(got, partner)], lane).wait()
            kept.add_(got)  # Left + right and right + left are the same sum.
        return [kept]

    def _shard(self, comm: Messenger, region: Tensor, rank: int) -> Tensor:
        """The shard of `region`, [n], of one rank of a level."""
        span = shard_of(range(region.numel()), rank, comm.world_size, in_order=self._in_order)
        return region[span.start : span.stop]

    def _rooms(self, stage: TreeStage, like: Tensor, count: int, lane: int) -> list[Tensor]:
        """`count` tensors with the shape [n] of `like`, for messages of a stage. All buckets of a
        lane use the same memory, since new memory costs a page fault per 4 KiB."""
        key = (lane, self._levels.index(stage.comm), like.dtype, like.device)
        numel = count * like.numel()
        if key not in self._room or self._room[key].numel() < numel:
            self._room[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return list(self._room[key][:numel].view(count, like.numel()))


def _add(values: list[Tensor], nodes: Sequence[Node], wanted: Sequence[Node]) -> list[Tensor]:
    """Add the values of nodes in tree order, in place; returns the values of the wanted nodes that
    exist."""
    merges, ends = merges_of(nodes, wanted)
    if values and values[0].is_cuda:
        for pairs in at_once(merges):
            foreach_add_([values[left] for left, _ in pairs], [values[right] for _, right in pairs])
        merges = []
    for left, right in merges:
        values[left].add_(values[right])
    return [values[end] for end in ends if end >= 0]


def _put(values: list[Tensor], place: Tensor) -> None:
    """Set `place` to the only one of `values`, or to zeros if no rank had a leaf."""
    if not values:
        place.zero_()
    elif values[0].data_ptr() != place.data_ptr():
        place.copy_(values[0])


def _down(comm: Messenger, region: Tensor, lane: int) -> None:
    """Give all ranks of a level all shards of `region`, [n], in place: the messages of `_halve_add`
    in reverse, or [n / ranks] from each rank to each, in its dtype."""
    if comm.world_size & (comm.world_size - 1):
        shards = region.chunk(comm.world_size)
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        sends = [(shards[comm.rank], rank) for rank in others]
        comm.exchange(sends, [(shards[rank], rank) for rank in others], lane).wait()
        return
    for partner, kept, other in reversed(_rounds(comm, region)):
        comm.exchange([(kept, partner)], [(other, partner)], lane).wait()


def _rounds(comm: Messenger, region: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """The rounds of a way up: partner, the half of the remaining `region` that this rank keeps,
    and the half that it sends."""
    found = []
    for power in range(comm.world_size.bit_length() - 1):
        low, high = region.chunk(2)
        region, other = (high, low) if comm.rank >> power & 1 else (low, high)
        found.append((comm.rank ^ 1 << power, region, other))
    return found


# -- the norm of shards ---------------------------------------------------------------------------

Pieces = list[tuple[ParameterBlock, list[tuple[int, int, int]]]]
"""Blocks, each with its pieces: (rank that holds it, first element in the bucket, last + 1)."""


def pieces_of_rank(blocks: Sequence[ParameterBlock], spans: Sequence[range], rank: int) -> Pieces:
    """The blocks that `rank` has a piece of, cut at the ends of the ranks' `spans`. The first
    piece's rank computes the block's norm."""
    in_order = sorted((span.start, span.stop, holder) for holder, span in enumerate(spans) if span)
    starts = [start for start, _, _ in in_order]
    found = []
    for block in blocks:
        place, pieces = bisect_right(starts, block.start) - 1, []
        while place < len(in_order) and in_order[place][0] < block.stop:
            start, stop, holder = in_order[place]
            pieces.append((holder, max(start, block.start), min(stop, block.stop)))
            place += 1
        if any(holder == rank for holder, _, _ in pieces):
            found.append((block, pieces))
    return found


class ShardedNorm:
    """The norm of gradients in shards, with the bits of whole gradients: see [Note: Fixed blocks]
    in replicas.py. Each rank computes the norms of the blocks that begin in its shards.

    Args:
        parameters: in the order in which their norms are added.
        comm: all ranks.
        exchange: determines which part of a bucket each rank has, and sends pieces of blocks.
    """

    def __init__(
        self, parameters: Sequence[Tensor], comm: Communicator, exchange: TreeExchange
    ) -> None:
        self._parameters, self._comm, self._exchange = list(parameters), comm, exchange
        counts = (-(-p.numel() // BLOCK) for p in parameters)
        self._firsts = list(itertools.accumulate(counts, initial=0))
        self._pieces: WeakKeyDictionary[Bucket, Pieces] = WeakKeyDictionary()
        self._places: tuple[list[int], Tensor] | None = None

    def of(
        self,
        buckets: Sequence[Bucket],
        shards: Sequence[Tensor],
        used: Sequence[bool],
        factor: float = 1.0,
    ) -> Tensor:
        """The norm, []: of all parameters that are `used`.

        One all-reduce: whole group, float64 [blocks]; overlaps nothing.

        Args:
            buckets: of all parameters.
            shards: the mean gradient in this rank's shard of each bucket, flat; or a rounded sum.
            used: for each parameter, whether its gradient counts.
            factor: from a rounded sum to the mean.
        """
        device = self._parameters[0].device
        norms = torch.zeros(max(self._firsts[-1], 1), dtype=torch.float64, device=device)
        self._exchange.submit(
            "norm", lambda lane: self._take_own(buckets, shards, norms, factor, lane)
        ).wait()
        self._comm.all_reduce(norms).wait()
        return total_norm(norms, self._parameters, used)

    def _take_own(
        self,
        buckets: Sequence[Bucket],
        shards: Sequence[Tensor],
        norms: Tensor,
        factor: float,
        lane: int,
    ) -> None:
        """Fill in this rank's part of `norms`. If a block ends in other shards, their owners send
        the rest: one message each, of less than a block, in the shard's dtype."""
        rank = self._comm.rank
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        wholes: list[tuple[Bucket, list[Tensor]]] = []
        places = []
        for bucket, shard in zip(buckets, shards, strict=True):
            first = self._exchange.owned(bucket.plan.numel, rank).start
            for block, pieces in self._pieces_of(bucket):
                owner, parts = pieces[0][0], []
                for holder, start, stop in pieces:
                    if holder == rank:
                        parts.append(shard[start - first : stop - first])
                        if owner != rank:
                            sends.append((parts[-1], owner))
                    elif owner == rank:
                        parts.append(shard.new_empty(stop - start))
                        receives.append((parts[-1], holder))
                if owner == rank:
                    wholes.append((bucket, parts))
                    places.append(self._firsts[block.index] + block.number)
        if sends or receives:
            self._exchange.messenger.exchange(sends, receives, lane).wait()
        if not wholes:
            return
        # Some blocks at a time, so that their widened copies stay in the processor's cache.
        size, found = len(wholes) if norms.is_cuda else 4, []
        for first in range(0, len(wholes), size):
            means = []
            for bucket, parts in wholes[first : first + size]:
                whole = torch.cat(parts) if len(parts) > 1 else parts[0]
                means.append(whole.to(bucket.dtype).mul_(factor) if bucket.rounded else whole)
            found.append(norms_of_blocks(means))
        if self._places is None or self._places[0] != places:
            self._places = places, torch.tensor(places, device=norms.device)  # waits, but only once
        norms[self._places[1]] = torch.cat(found)

    def _pieces_of(self, bucket: Bucket) -> Pieces:
        if bucket not in self._pieces:
            ranks = range(self._comm.world_size)
            owned = [self._exchange.owned(bucket.plan.numel, rank) for rank in ranks]
            blocks = blocks_of(bucket.plan.slots)
            self._pieces[bucket] = pieces_of_rank(blocks, owned, self._comm.rank)
        return self._pieces[bucket]
