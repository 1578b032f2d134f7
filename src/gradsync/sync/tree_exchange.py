"""Sums over ranks along the fixed tree: each shard's owner adds, then sends the sum to all ranks.

    rank 0  nodes of leaves 0 1 2 ─┐ slices of shard r    ┌─ rank r adds them    ─┐ shard r
    rank 1  nodes of leaves 3 4   ─┼─────────────────────►│  in tree order:      ─┼───► all ranks
    rank 2  nodes of leaves 5 6 7 ─┘ go to rank r         └─ (0,2)+..., see Note ─┘

With one node per rank (equal shares of 2^k leaves) a rank sends 2(W-1)/W of the bucket, exactly as
much as in a ring all-reduce; with uneven shares a rank has up to 2 log2(leaves) nodes and sends
that many slices in the first half. Everything goes point to point on a thread beside backward, so
it does not interfere with the main thread's collectives.

Over hosts, where equally many ranks sit on each and are numbered host by host: the same in two
stages. Ranks of a host first add the nodes inside of the host's leaves (its largest nodes), then
ranks with the same place on every host finish the tree for their shard, so that a rank of L sends
1/L of what crosses. The additions are the tree's, so bits are the same.

The first half (slices to their owners, and the additions) may be asked for alone, and the second
one later: late_update.py lets the next forward wait for that.

Siblings: where n ranks, a power of two, have one node each and these are the tree's next level, a
stage goes up the tree itself: partners at distance 1, 2, 4 ... exchange halves of what they have
left and add them (recursive halving), and go back down in the same way. The same bytes in
log2(n) messages instead of n - 1. (Thakur et al. 2005, "Optimization of collective communication
operations in MPICH", with the distances in the tree's order.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Messenger, Work
from gradsync.comm.process_group import Background, Done
from gradsync.sync.buckets import (
    FORGOTTEN,
    UNKNOWN,
    Bucket,
    Node,
    Sums,
    checked_shares,
    largest_nodes,
    merges_of,
    root,
)
from gradsync.sync.exchange import Exchange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeStage:
    """One round of adding: the nodes that ranks hold, and those they compute."""

    comm: Messenger
    nodes: list[list[Node]]
    """Nodes held by each rank of `comm`, in leaf order."""
    wanted: list[Node]
    """Nodes that the owners of their shards compute."""
    siblings: bool
    """Whether `are_siblings(nodes)`."""

    def parts(self, region: Tensor) -> list[Tensor]:
        """`region`, [n], and the parts of it with which this rank goes on after each round; the
        last one is its shard, [n / ranks]."""
        spans = self.spans(range(region.numel()), self.comm.rank)
        return [region[span.start : span.stop] for span in spans]

    def spans(self, region: range, rank: int) -> list[range]:
        """The elements that `parts` of `rank` hold."""
        ranks = self.comm.world_size
        if not self.siblings:
            size = len(region) // ranks
            return [region, region[rank * size : (rank + 1) * size]]
        found = [region]
        for distance in _distances(ranks.bit_length()):
            half = len(found[-1]) // 2
            found.append(found[-1][half:] if rank & distance else found[-1][:half])
        return found


def are_siblings(nodes: Sequence[Sequence[Node]]) -> bool:
    """Whether these are all nodes of one level below another node, one on each rank."""
    count, (level, first) = len(nodes), (nodes[0] or [(0, 1)])[0]
    below = [[(level, first + place)] for place in range(count)]
    return count & (count - 1) == 0 and first % count == 0 and list(nodes) == below


class TreeExchange(Exchange):
    """Sums along the tree, see the module's picture.

    Args:
        comm: all ranks.
        levels: the communicators to go through, `[comm]` or `[inside the host, between hosts]`;
            ranks must be numbered host by host.
        device: device of the gradients.
        over_leaves: the tree of all ranks' leaves; False: of ranks, whose sums are in any order.
    """

    def __init__(
        self,
        comm: Messenger,
        levels: Sequence[Messenger],
        device: torch.device,
        *,
        over_leaves: bool = True,
    ) -> None:
        self._comm, self._over_leaves = comm, over_leaves
        self._levels = levels
        self._device = device
        self._background = Background(device)
        self._num_buffers = 0
        self._indexed = False
        self.stages: list[TreeStage] = []
        """Rounds of this step; the same object as long as ranks' shares of leaves are the same."""
        self._told: list[tuple[int, int]] = []
        self._own: range = range(0)
        self._room: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self.whole = True
        """Whether the step's buckets were launched whole, not by halves."""

    def begin(self, sums: Sums) -> None:
        """Exchange the ranks' numbers of leaves; see `Exchange.begin`."""
        self._num_buffers = sums.num_buffers
        self._indexed = sums.first_leaf is not None
        first = UNKNOWN if sums.first_leaf is None else sums.first_leaf
        mine = (sums.num_leaves if self._over_leaves else 1, first)
        if self._comm.world_size == 1:
            self._plan([mine])
        else:
            self._background.submit(lambda: self._plan(self._share(mine)))

    def launch(self, bucket: Bucket) -> Work:
        self.whole = True
        buffers = self._buffers(bucket)
        if self._comm.world_size == 1:
            self._reduce(buffers)
            return Done()
        return self.submit(lambda: self._both(buffers))

    def launch_half(self, bucket: Bucket) -> Work:
        self.whole = False
        buffers = self._buffers(bucket)
        return self.submit(lambda: self._reduce(buffers))

    def gather(self, bucket: Bucket) -> Work:
        """Start the other half."""
        flat = bucket.flat(0)
        return self.submit(lambda: self._gather(flat))

    def _buffers(self, bucket: Bucket) -> list[Tensor]:
        return [bucket.flat(number) for number in range(max(self._num_buffers, 1))]

    def submit(self, fn: Callable[[], None]) -> Work:
        """Run `fn` beside the main thread, after what was launched before; it may send messages
        by `messenger`."""
        return self._background.submit(fn)

    @property
    def messenger(self) -> Messenger:
        """All ranks, for functions given to `submit`."""
        return self._comm

    def owned(self, bucket: Bucket, rank: int) -> range:
        """Elements of `bucket` of which `rank` gets the sum by a first half alone; to be asked for
        when that is done."""
        span = range(bucket.plan.numel)
        size = self._levels[0].world_size
        for stage, place in zip(self.stages, (rank % size, rank // size), strict=False):
            span = stage.spans(span, place)[-1]
        return span

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _share(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        """Every rank's (number of leaves, first leaf): int64 [2] from each rank to each.

        On the gradients' device, which every group takes; on CUDA only this thread waits for it.
        """
        own = torch.tensor(mine, device=self._device)
        others = [rank for rank in range(self._comm.world_size) if rank != self._comm.rank]
        told = {rank: torch.empty_like(own) for rank in others}
        told[self._comm.rank] = own
        self._comm.exchange(
            [(own, rank) for rank in others], [(told[rank], rank) for rank in others]
        ).wait()
        return [tuple(told[rank].tolist()) for rank in range(self._comm.world_size)]

    def _plan(self, told: list[tuple[int, int]]) -> None:
        if told == self._told:
            return
        if any(first == FORGOTTEN for _, first in told):
            self.stages, self._told = [], told
            return
        ranges, self._told = checked_shares(told), told
        self._own = ranges[self._comm.rank]
        total = root(ranges[-1].stop)
        nodes = [largest_nodes(leaves) for leaves in ranges]
        if len(self._levels) == 1:
            self.stages = [TreeStage(self._levels[0], nodes, [total], are_siblings(nodes))]
            return
        intra, inter = self._levels
        size = intra.world_size
        hosts = [
            range(ranges[first].start, ranges[first + size - 1].stop)
            for first in range(0, self._comm.world_size, size)
        ]
        of_hosts = [largest_nodes(leaves) for leaves in hosts]
        inside = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        host = self._comm.rank // size
        # One way on all hosts: siblings cut buckets otherwise, and shards must meet between hosts.
        siblings = all(map(are_siblings, inside))
        self.stages = [
            TreeStage(intra, inside[host], of_hosts[host], siblings),
            TreeStage(inter, of_hosts, [total], are_siblings(of_hosts)),
        ]

    def _both(self, buffers: list[Tensor]) -> None:
        self._reduce(buffers)
        self._gather(buffers[0])

    def _reduce(self, buffers: list[Tensor]) -> None:
        """Add up; this rank's shard of the sum ends in `buffers[0]`, at its place."""
        if not self.stages:
            return  # the step is discarded
        result = buffers[0]
        values = buffers[: self._num_buffers]
        if not self._indexed:
            # Every leaf still has a buffer: finish the nodes inside of this rank's range.
            singles = [(0, leaf) for leaf in self._own]
            values = _add(values, singles, largest_nodes(self._own))
        parts = [result]
        for stage in self.stages:
            climb = self._halve_add if stage.siblings else self._scatter_add
            values = climb(stage, values, parts[-1])
            parts.append(stage.parts(parts[-1])[-1])
        if not values:
            parts[-1].zero_()  # no rank had a leaf
        elif values[0].data_ptr() != parts[-1].data_ptr():
            parts[-1].copy_(values[0])

    def _gather(self, result: Tensor) -> None:
        """Give all ranks all shards of `result`, in place."""
        regions = [result]
        for stage in self.stages[:-1]:
            regions.append(stage.parts(regions[-1])[-1])
        for stage, region in zip(reversed(self.stages), reversed(regions), strict=False):
            (_double if stage.siblings else _all_gather)(stage, region)

    def _scatter_add(self, stage: TreeStage, values: list[Tensor], region: Tensor) -> list[Tensor]:
        """Send every rank its shard of this rank's values, add up the slices of this rank's shard.

        Point to point, one slice [n / ranks] per node and pair of ranks, the bucket's dtype; beside
        backward.

        Args:
            stage: nodes of each rank.
            values: of this rank's nodes, each [n]; may be empty.
            region: the result's region, [n]; for its shape and dtype only.
        """
        comm, mine = stage.comm, stage.comm.rank
        own_part = _part(region, mine, comm.world_size)
        sends, receives, arrived = [], [], []
        others = sum(len(nodes) for rank, nodes in enumerate(stage.nodes) if rank != mine)
        rooms = iter(self._rooms(stage, own_part, others))
        for rank, nodes in enumerate(stage.nodes):
            if rank == mine:
                arrived += [_part(value, mine, comm.world_size) for value in values]
                continue
            sends += [(_part(value, rank, comm.world_size), rank) for value in values]
            slices = [next(rooms) for _ in nodes]
            receives += [(piece, rank) for piece in slices]
            arrived += slices
        comm.exchange(sends, receives).wait()
        nodes = [node for nodes_of_rank in stage.nodes for node in nodes_of_rank]
        return _add(arrived, nodes, stage.wanted)

    def _halve_add(self, stage: TreeStage, values: list[Tensor], region: Tensor) -> list[Tensor]:
        """As `_scatter_add` between siblings: messages of [n / 2], [n / 4] ... to one rank
        each, the bucket's dtype; beside backward."""
        kept = stage.parts(values[0])
        for distance, (whole, half) in zip(_distances(len(kept)), pairwise(kept), strict=True):
            partner, (got,) = stage.comm.rank ^ distance, self._rooms(stage, half, 1)
            stage.comm.exchange([(_other(whole, half), partner)], [(got, partner)]).wait()
            half.add_(got)  # left + right or right + left: one sum
        return [kept[-1]]

    def _rooms(self, stage: TreeStage, like: Tensor, count: int) -> list[Tensor]:
        """`count` tensors of the shape [n] of `like`, for messages of a stage: the same memory for
        each bucket, since new memory costs a page fault for each 4 KiB."""
        key = (self._levels.index(stage.comm), like.dtype, like.device)
        numel = count * like.numel()
        if key not in self._room or self._room[key].numel() < numel:
            self._room[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return list(self._room[key][:numel].view(count, like.numel()))


def _add(values: list[Tensor], nodes: Sequence[Node], wanted: Sequence[Node]) -> list[Tensor]:
    """Add in tree order, in place; returns the values of the wanted nodes that exist."""
    merges, ends = merges_of(nodes, wanted)
    for left, right in merges:
        values[left].add_(values[right])
    return [values[end] for end in ends if end >= 0]


def _double(stage: TreeStage, region: Tensor) -> None:
    """As `_all_gather` between siblings, the messages of `_halve_add` in reverse."""
    kept = stage.parts(region)
    rounds = zip(_distances(len(kept)), pairwise(kept), strict=True)
    for distance, (whole, half) in reversed(list(rounds)):
        partner = stage.comm.rank ^ distance
        stage.comm.exchange([(half, partner)], [(_other(whole, half), partner)]).wait()


def _distances(num_parts: int) -> list[int]:
    return [1 << power for power in range(num_parts - 1)]


def _other(whole: Tensor, half: Tensor) -> Tensor:
    """The half of `whole` that `half` is not."""
    low, high = whole.chunk(2)
    return high if half.data_ptr() == low.data_ptr() else low


def _all_gather(stage: TreeStage, region: Tensor) -> None:
    """All-gather the shards of `region`, [n], in place, by messages of [n / ranks], its dtype."""
    comm = stage.comm
    ranks = range(comm.world_size)
    parts = [_part(region, rank, comm.world_size) for rank in ranks]
    others = [rank for rank in ranks if rank != comm.rank]
    comm.exchange(
        [(parts[comm.rank], rank) for rank in others], [(parts[rank], rank) for rank in others]
    ).wait()


def _part(region: Tensor, rank: int, world_size: int) -> Tensor:
    size = region.numel() // world_size
    return region[rank * size : (rank + 1) * size]
