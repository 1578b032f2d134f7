"""Several hosts whose ranks share memory: right in any layout, alike wherever tensors lie, and
no rank waits for one that has gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import Groups
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import all_reduce
from gradsync.comm.shared_memory import hierarchy
from gradsync.comm.shared_memory.communicator import STAGE_BYTES, SharedMemoryCommunicator
from gradsync.comm.shared_memory.hierarchy import all_reduce_over_hosts, share_hosts
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import LostPeerError
from gradsync.sync import exchange
from gradsync.sync.buckets import Bucket
from gradsync.sync.engine import Engine
from gradsync.sync.exchange import OverHosts
from gradsync.sync.layout import BucketPlan, Slot
from gradsync.sync.replicate import replicate
from support.comm_cases import FLOATS, INTEGERS, OPS, check_all, lengths, rank_input
from support.engine_cases import PROBLEMS, Way, groups_of, pretend_hosts, train
from support.host_layouts import LAYOUTS, placement
from support.thread_ranks import run_thread_ranks

KIB = 2**-10
LONG = STAGE_BYTES // 2 + 77
"""Elements of fp32: several pieces on the way through small buffers, unequal shares."""

OnHost = Callable[[int, SharedMemoryCommunicator, Groups], Any]


def on_hosts(layout: str, fn: OnHost) -> list[Any]:
    """`fn(rank, host, groups)` on every rank, as threads that pretend to sit on several hosts."""
    places = placement(LAYOUTS[layout])

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        groups = groups_of(ProcessGroupCommunicator(group), places)
        host = share_hosts(ProcessGroupCommunicator(group), groups.intra)
        try:
            return fn(rank, host, groups)
        finally:
            host.close()

    return run_thread_ranks(work, len(places.seats))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_length_and_dtype(layout: str) -> None:
    """Right, with the same bits on all ranks, and the same in place and through small buffers."""
    world_size = len(LAYOUTS[layout])
    cases = [(n, torch.float32, op) for n in lengths(world_size) for op in OPS]
    cases += [(9001, dtype, "sum") for dtype in (*FLOATS, *INTEGERS)]
    cases += [(LONG, torch.float32, "sum")]

    def work(rank: int, host: SharedMemoryCommunicator, groups: Groups) -> list[Tensor]:
        homes = {dtype: host.allocate(LONG, dtype) for dtype in (*FLOATS, *INTEGERS)}
        results = []
        for length, dtype, op in cases:
            tensor = rank_input(rank, length, dtype)
            home = homes[dtype][:length].copy_(tensor)
            for one in (tensor, home):
                all_reduce_over_hosts(host, groups.inter, one, op, equal_nodes=groups.equal_nodes)
            assert torch.equal(tensor, home), (length, dtype, op)
            results.append(tensor)
        return results

    by_rank = on_hosts(layout, work)
    for i, (_, _, op) in enumerate(cases):
        check_all([results[i] for results in by_rank], op)


def test_groups_that_share_memory_serve_the_plain_all_reduce() -> None:
    def work(rank: int, host: SharedMemoryCommunicator, groups: Groups) -> list[Tensor]:
        sharing = replace(groups, intra=host)
        comm = host.base  # the ranks of the host; `all_reduce` asks it only for what it supports
        mean = all_reduce(
            rank_input(rank, 5, torch.float32), "mean", "hierarchical", comm=comm, groups=sharing
        )
        return [mean, all_reduce(torch.tensor([rank]), "max", "hierarchical", groups=sharing)]

    expected = torch.stack([rank_input(rank, 5, torch.float32) for rank in range(4)])
    for mean, largest in on_hosts("2 x 2", work):
        assert largest.item() == 3
        torch.testing.assert_close(mean, expected.sum(0) / 2)


# -- gradient synchronisation -------------------------------------------------------------------

SMALL = {"bucket_mb": KIB, "first_bucket_mb": 0.25 * KIB}
ON_TWO = Way(sync="hierarchical", ranks_a_host=2, options=SMALL)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also buckets of a few bytes."""
    monkeypatch.setattr(exchange, "LEAST_BYTES", 0)


def trained(world_size: int, way: Way = ON_TWO) -> str:
    """Train on several hosts; the hash on which all ranks agree."""

    def work(_: int, group: dist.ProcessGroup) -> str:
        return train(PROBLEMS["mixed dtypes"], way, ProcessGroupCommunicator(group))

    (first, *rest) = run_thread_ranks(work, world_size)
    assert rest == [first] * (world_size - 1)
    return first


class Backwards(nn.Sequential):
    """Its gradients come in another order than one would think."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


@pytest.mark.usefixtures("in_place")
def test_buckets_lie_in_memory_of_the_host() -> None:
    """Also after they have been laid out anew; what held the old ones is given back."""

    def work(rank: int, group: dist.ProcessGroup) -> list[Any]:
        comm = ProcessGroupCommunicator(group)
        model = Backwards(*(nn.Linear(8, 8) for _ in range(4)))
        groups = pretend_hosts(comm, 2)
        sync = replicate(model, strategy="hierarchical", comm=comm, groups=groups, **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):  # after the first one buckets are laid out in the order seen
            sync.backward(model(torch.full((1, 8), rank + 1.0)).sum(), weight=1, reduction="sum")
            sync.step(optimizer)
        engine = sync.replica.reducer
        assert isinstance(engine, Engine)
        assert isinstance(engine.exchange, OverHosts)
        host = engine.exchange.host
        placed = [host.parts_of(bucket.flat(0)) is not None for bucket in engine.buckets]
        num_regions = len(host._regions)
        sync.close()
        assert not host._regions
        return [placed, num_regions, model.state_dict()]

    results = run_thread_ranks(work, 4)
    for placed, num_regions, weights in results:
        assert placed == [True] * 3
        assert num_regions == 3
        for name, tensor in weights.items():
            assert torch.equal(tensor, results[0][2][name])


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("world_size", [3, 4])
def test_too_little_memory_for_buckets_changes_no_bits(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of equal size, and not."""
    expected = trained(world_size)

    def refuse(*_: object) -> Tensor:
        raise SharedMemoryError("too little")

    monkeypatch.setattr(SharedMemoryCommunicator, "allocate", refuse)
    assert trained(world_size) == expected


def refuse_on_second_host(monkeypatch: pytest.MonkeyPatch) -> None:
    share_memory = hierarchy.share_memory

    def share(base: Any) -> SharedMemoryCommunicator:
        if threading.current_thread().name in ("rank2", "rank3"):
            raise SharedMemoryError("no shared memory: not here")
        return share_memory(base)

    monkeypatch.setattr(hierarchy, "share_memory", share)


def test_one_host_that_cannot_makes_all_use_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way = replace(ON_TWO, options={**SMALL, "collective": "backend"})
    by_messages = trained(4, way)
    refuse_on_second_host(monkeypatch)
    with caplog.at_level(logging.INFO, logger="gradsync"):
        assert trained(4) == by_messages
    (line,) = [r.getMessage() for r in caplog.records if "inside of hosts" in r.getMessage()]
    assert line == "inside of hosts by messages: rank 2: no shared memory: not here"


def test_who_insists_on_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_on_second_host(monkeypatch)

    def work(_: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        with pytest.raises(SharedMemoryError, match="rank 2: no shared memory: not here"):
            replicate(
                nn.Linear(2, 2),
                strategy="hierarchical",
                comm=comm,
                groups=pretend_hosts(comm, 2),
                collective="shared_memory",
            )

    run_thread_ranks(work, 4)


# -- what fails ---------------------------------------------------------------------------------


class Broken:
    """A messenger whose connections are gone."""

    rank, world_size = 0, 2

    def exchange(self, *_: object) -> None:
        raise RuntimeError("connection lost")


def test_who_loses_another_host_tells_its_own() -> None:
    """Rank 2's connection to rank 0 breaks: rank 3 hears of it, though all is well with rank 1.

    Ranks 0 and 1 wait for messages then, until a session or the end of a process cuts them off.
    """
    said: dict[int, str] = {}
    rank_3_is_told = threading.Event()

    def work(rank: int, host: SharedMemoryCommunicator, groups: Groups) -> None:
        inter = Broken() if rank == 2 else groups.inter
        try:
            all_reduce_over_hosts(host, inter, torch.zeros(10_000), equal_nodes=True)
        except RuntimeError as error:
            said[rank] = str(error)
            if rank == 3:
                rank_3_is_told.set()
            if rank == 2:
                assert rank_3_is_told.wait(5)
            raise

    with pytest.raises(RuntimeError, match=r"connection lost|left"):
        on_hosts("2 x 2", work)
    assert said[2] == "connection lost"
    assert "rank(s) 0 left" in said[3]
    assert "counting the ranks of this host alone" in said[3]
    assert len(said) == 4


@pytest.mark.usefixtures("in_place")
def test_a_bucket_that_misses_a_rank_fails_and_so_do_later_ones() -> None:
    def work(rank: int, host: SharedMemoryCommunicator, groups: Groups) -> None:
        transport = OverHosts(
            host, lambda flat: all_reduce_over_hosts(host, groups.inter, flat, equal_nodes=True)
        )
        plan = BucketPlan(slots=(Slot(index=0, offset=0, numel=64),), numel=192)
        bucket = Bucket(plan, [nn.Parameter(torch.zeros(64))])
        bucket.view(0, 0).fill_(1.0)
        transport.launch(bucket).wait()
        assert float(bucket.view(0, 0).sum()) == 192
        if rank == 0:
            for one in (transport.launch(bucket), transport.launch(bucket)):
                with pytest.raises(LostPeerError, match=r"rank\(s\) 1.* left"):
                    one.wait()
        transport.close()

    on_hosts("one node", work)
