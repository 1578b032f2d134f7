"""Messages of sums along the tree, counted on one rank of many hosts."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from gradsync.comm.base import Messages
from gradsync.comm.process_group import Done, Subset
from gradsync.sync.buckets import Bucket, TreeSums
from gradsync.sync.layout import BucketPlan, Slot
from gradsync.sync.tree_exchange import TreeExchange


class OneRank:
    """A messenger of rank `rank` alone: what others would send stays as it is, but for the numbers
    of their leaves."""

    def __init__(self, rank: int, world_size: int, leaves: int) -> None:
        self.rank, self.world_size, self.leaves = rank, world_size, leaves
        self.sent: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self.channels: defaultdict[int, set[int]] = defaultdict(set)
        """Of each thread."""

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Done:
        self.channels[threading.get_ident()].add(channel)
        for tensor, peer in receives:
            if not tensor.is_floating_point():
                tensor.copy_(torch.tensor([self.leaves, self.leaves * peer]))
        for tensor, peer in sends:
            if tensor.is_floating_point():
                self.sent[peer] += tensor.numel()
                self.messages[peer] += 1
        return Done()


def counted(
    rank: int, hosts: int, local: int, leaves: int, numel: int, *, buckets: int = 1
) -> OneRank:
    """The messenger of `rank` after buckets of `numel` elements."""
    world_size, host = hosts * local, rank // local
    comm = OneRank(rank, world_size, leaves)
    inside = [host * local + place for place in range(local)]
    between = [other * local + rank % local for other in range(hosts)]
    exchange = TreeExchange(
        comm, [Subset(comm, inside), Subset(comm, between)], torch.device("cpu")
    )
    plan = BucketPlan(slots=(Slot(index=0, offset=0, numel=numel),), numel=numel)
    sums = TreeSums()
    for leaf in range(leaves):
        sums.begin_micro_batch(rank * leaves + leaf)
    exchange.begin(sums)
    for number in range(buckets):
        exchange.launch(Bucket(plan, [nn.Parameter(torch.zeros(numel))], number=number)).wait()
    exchange.close()
    return comm


def both_ways(ranks: int) -> int:
    """Messages of a stage: up the tree and down between siblings, else to all and from all."""
    return 2 * (int(math.log2(ranks)) if ranks & (ranks - 1) == 0 else ranks - 1)


@pytest.mark.parametrize("local", [1, 2, 8])
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 6, 16, 64])
def test_a_rank_sends_its_shard_alone_between_hosts(hosts: int, local: int) -> None:
    numel = 64 * hosts * local
    for rank in {0, hosts * local // 2, hosts * local - 1}:
        found = counted(rank, hosts, local, 2, numel)
        inside = [peer for peer in found.sent if peer // local == rank // local]
        between = found.sent.keys() - inside
        assert sum(found.sent[peer] for peer in inside) == 2 * numel * (local - 1) // local
        assert sum(found.sent[peer] for peer in between) == (
            2 * numel * (hosts - 1) // (hosts * local)
        )
        assert sum(found.messages[peer] for peer in inside) == both_ways(local)
        assert sum(found.messages[peer] for peer in between) == both_ways(hosts)


def test_uneven_leaves_cost_a_message_for_each_node() -> None:
    """Three leaves a rank: its two largest nodes go to all owners, one sum comes back."""
    found = counted(1, 1, 4, 3, 256)
    assert found.messages.total() == 3 * 2 + 2
    assert sum(found.sent.values()) == 3 * (2 + 1) * 64


@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("leaves", [1, 2])
def test_buckets_on_their_way_at_once_have_channels_of_their_own(
    hosts: int, local: int, leaves: int
) -> None:
    """Messages of a channel are matched by their order, which two threads would not keep."""
    found = counted(0, hosts, local, leaves, 64 * hosts * local, buckets=2).channels
    assert sorted(map(list, found.values())) == [[0], [1]]


class Held(OneRank):
    """Holds the first bucket's messages back until the second one's are posted."""

    def __init__(self) -> None:
        super().__init__(0, 2, 1)
        self.one, self.both = threading.Event(), threading.Event()
        self.posted: list[tuple[int, range]] = []
        """Channels, and addresses that are received into."""

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Done:
        super().exchange(sends, receives, channel)
        if receives[0][0].is_floating_point():
            room = receives[0][0]
            here = range(room.data_ptr(), room.data_ptr() + room.nbytes)
            self.posted.append((channel, here))
            self.one.set()
            if len(self.posted) == 2:
                self.both.set()
            assert self.both.wait(20), "the second bucket waits for the first one"
        return Done()


def test_two_buckets_are_on_their_way_at_once_and_never_meet() -> None:
    comm, sums, numel = Held(), TreeSums(), 128
    exchange = TreeExchange(comm, [comm], torch.device("cpu"))
    plan = BucketPlan(slots=(Slot(index=0, offset=0, numel=numel),), numel=numel)
    sums.begin_micro_batch(0)
    exchange.begin(sums)
    buckets = [Bucket(plan, [nn.Parameter(torch.zeros(numel))], number=n) for n in range(2)]
    work = exchange.launch(buckets[0], half=True)
    assert comm.one.wait(20)
    exchange.launch(buckets[1], half=True).wait()
    work.wait()
    (first, room), (second, other) = comm.posted
    assert first != second, "messages of one channel are matched by their order"
    assert room.stop <= other.start or other.stop <= room.start
    exchange.close()
