"""Collectives through shared memory give what the process group's give, wherever tensors lie."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import (
    STAGE_BYTES,
    SharedMemoryCommunicator,
    _leave,
    fastest,
    share_memory,
)
from gradsync.comm.shared_memory.ordered_ops import PAGE_BYTES, Flags, Patience
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import LostPeerError, RunError
from support.comm_cases import FLOATS, INTEGERS, OPS, check_all, lengths, rank_input
from support.thread_ranks import run_thread_ranks

LONG = STAGE_BYTES // 4 + 77  # more than one piece of fp32


def on_ranks(world_size: int, fn: Callable[[SharedMemoryCommunicator], Any]) -> list[Any]:
    """`fn(comm)` on every rank, as threads."""

    def work(_: int, group: Any) -> Any:
        comm = share_memory(ProcessGroupCommunicator(group))
        try:
            return fn(comm)
        finally:
            comm.close()

    return run_thread_ranks(work, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_of_any_length_and_dtype(world_size: int) -> None:
    """In place and through the small buffers."""
    cases = [(n, torch.float32, op) for n in [*lengths(world_size), LONG] for op in OPS]
    cases += [(1000, dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in OPS]

    def work(comm: SharedMemoryCommunicator) -> list[Tensor]:
        results = []
        for length, dtype, op in cases:
            tensor = rank_input(comm.rank, length, dtype)
            home = comm.allocate(length, dtype).copy_(tensor)
            comm.all_reduce(tensor, op).wait()
            comm.all_reduce(home, op).wait()
            assert torch.equal(home, tensor)
            comm.release(home)
            results.append(tensor)
        return results

    by_rank = on_ranks(world_size, work)
    for i, (_, _, op) in enumerate(cases):
        check_all([results[i] for results in by_rank], op)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_collectives(world_size: int) -> None:
    def collect(comm: SharedMemoryCommunicator, length: int) -> dict[str, Tensor]:
        mine = rank_input(comm.rank, length, torch.float32)
        sent = mine.clone()
        comm.broadcast(sent, src=world_size - 1).wait()
        gathered = torch.zeros(world_size * length)
        comm.all_gather(gathered, mine).wait()
        rows = rank_input(comm.rank, world_size * length, torch.float32)
        scattered = torch.zeros(length)
        comm.reduce_scatter(scattered, rows).wait()
        comm.barrier()
        return {"broadcast": sent, "all_gather": gathered, "reduce_scatter": scattered}

    def check(of_length: list[dict[str, Tensor]], length: int) -> None:
        inputs = [rank_input(rank, length, torch.float32) for rank in range(world_size)]
        rows = [rank_input(rank, world_size * length, torch.float32) for rank in range(world_size)]
        total = torch.stack(rows).double().sum(0)
        for rank, found in enumerate(of_length):
            assert torch.equal(found["broadcast"], inputs[-1])
            assert torch.equal(found["all_gather"], torch.cat(inputs))
            expected = total[rank * length : (rank + 1) * length].float()
            torch.testing.assert_close(found["reduce_scatter"], expected)

    lengths = (0, 1, 5, 1000, LONG)
    by_rank = on_ranks(world_size, lambda comm: [collect(comm, length) for length in lengths])
    for i, length in enumerate(lengths):
        check([found[i] for found in by_rank], length)


def test_strided_conjugated_and_complex_tensors() -> None:
    def work(comm: SharedMemoryCommunicator) -> tuple[Tensor, Tensor]:
        strided = torch.arange(12.0).view(3, 4).t()
        comm.all_reduce(strided).wait()
        memory = comm.allocate(12, torch.float32).copy_(torch.arange(12.0))
        comm.barrier()
        comm.all_reduce(memory[::2]).wait()
        assert memory[1::2].tolist() == [1, 3, 5, 7, 9, 11]
        assert memory[::2].tolist() == [0, 4, 8, 12, 16, 20]
        lazy = torch.full((4,), 1 + 2j).conj()
        comm.all_reduce(lazy).wait()
        return strided.clone(), lazy.clone()

    for strided, lazy in on_ranks(2, work):
        assert torch.equal(strided, 2 * torch.arange(12.0).view(3, 4).t())
        assert torch.equal(lazy, torch.full((4,), 2 - 4j))


def test_many_operations_under_way_end_in_their_order() -> None:
    """Waited for backwards; placed and staged ones mixed, each on values of its own."""

    def work(comm: SharedMemoryCommunicator) -> list[Tensor]:
        homes = [comm.allocate(3000, torch.float32) for _ in range(3)]
        tensors = []
        for number in range(12):
            placed = number % 3 == 0
            tensor = homes[number // 3 % 3][:500] if placed and number < 9 else torch.empty(5000)
            tensor.fill_(number + 100 * comm.rank)
            tensors.append(tensor)
        works = [comm.all_reduce(tensor) for tensor in tensors]
        for w in reversed(works):
            w.wait()
        return [tensor.clone() for tensor in tensors]

    for tensors in on_ranks(3, work):
        for number, tensor in enumerate(tensors):
            assert bool((tensor == 3 * number + 300).all())


def test_ranks_that_do_different_things_are_told() -> None:
    """Every difference between two operations is refused, and nothing is combined."""

    def work(comm: SharedMemoryCommunicator) -> list[str]:
        rank, told = comm.rank, []
        ones = torch.ones(10)
        homes = [comm.allocate(10, torch.float32) for _ in range(2)]
        things = [
            lambda c: c.all_reduce(torch.ones(10 + rank)),
            lambda c: c.all_reduce(ones if rank else torch.ones(10, dtype=torch.int32)),
            lambda c: c.all_reduce(ones, "min" if rank else "max"),
            lambda c: c.broadcast(ones, src=rank),
            lambda c: c.broadcast(ones) if rank else c.all_reduce(ones),
            lambda c: c.run(lambda: None, "one thing" if rank else "another"),
        ]
        placed = [
            lambda c: c.all_reduce(homes[0] if rank else ones),
            lambda c: c.all_reduce(homes[rank]),
            lambda c: c.all_reduce(homes[0][rank : rank + 5]),
        ]
        for thing in [*things, *placed]:
            fresh = share_memory(comm.base)
            fresh._regions = list(comm._regions)
            with pytest.raises(RunError, match="different operations at the same time") as found:
                thing(fresh).wait()
            told.append(str(found.value))
            comm.base.barrier()
            fresh.close()
        assert bool((ones == 1).all())
        return told

    first, second = on_ranks(2, work)
    assert "float32 [10]" in first[0]
    assert "rank(s) 1" in first[0]
    assert "float32 [11]" in second[0]


def test_what_fails_half_way_does_not_run_again() -> None:
    """Peers do not wait for it."""

    def work(comm: SharedMemoryCommunicator) -> list[int]:
        calls = []

        def share() -> None:
            calls.append(1)
            if comm.rank:
                raise KeyError("spoilt")

        comm.patience.timeout_s = 10
        expected = KeyError if comm.rank else LostPeerError
        with pytest.raises(expected, match="spoilt" if comm.rank else r"rank\(s\) 1 left"):
            comm.run(share, "a share").wait()
        with pytest.raises(RunError, match="failed in a share.*spoilt" if comm.rank else "left"):
            comm.barrier()
        comm.base.barrier()  # no rank has learned it from a communicator that was closed
        return calls

    assert on_ranks(2, work) == [[1], [1]]


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    flags = Flags(0, [page])
    patience = Patience(0, [os.getpid()], 1.0)
    _leave(flags, patience, os.getppid())
    assert flags.left([0]) == []
    _leave(flags, patience, os.getpid())
    assert flags.left([0]) == [0]


def test_a_rank_that_leaves_is_missed() -> None:
    def work(comm: SharedMemoryCommunicator) -> None:
        if comm.rank == 1:
            comm.close()
            return
        with pytest.raises(LostPeerError, match=r"rank\(s\) 1 left"):
            comm.all_reduce(torch.zeros(3)).wait()
        with pytest.raises(LostPeerError, match="left"):  # and it stays so
            comm.barrier()

    on_ranks(2, work)


def test_peers_of_a_rank_that_gave_up_are_told() -> None:
    """At the first operation that needs it; and a model made later has another communicator."""

    def work(comm: SharedMemoryCommunicator) -> None:
        if comm.rank == 0:
            comm.patience.timeout_s = 0.1
            with pytest.raises(LostPeerError, match=r"waited 0 s for rank\(s\) 1"):
                comm.all_reduce(torch.ones(3)).wait()
        comm.base.barrier()
        if comm.rank == 1:
            comm.all_reduce(torch.ones(3)).wait()  # rank 0's part is there
            assert not comm.ops.broken
        cpu = torch.device("cpu")
        fresh = fastest(comm.base, cpu, [comm])
        assert fresh is not comm
        assert fastest(comm.base, cpu, [comm, fresh]) is fresh
        fresh.close()
        if comm.rank == 1:
            comm.patience.timeout_s = 20
            with pytest.raises(LostPeerError, match=r"rank\(s\) 0 left"):
                comm.all_reduce(torch.ones(3)).wait()
        comm.base.barrier()  # no rank has learned it from a communicator that was closed

    on_ranks(2, work)


def test_who_has_ended_is_named_before_who_left_for_it() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as peer:
        patience = Patience(0, [os.getpid(), peer.pid, os.getpid()], 20.0)

        def left(_: list[int]) -> list[int]:
            """Rank 2 has seen the end of rank 1, which this rank had not when it looked."""
            peer.communicate()
            return [2]

        with pytest.raises(LostPeerError, match=r"rank 1 \(process \d+\) has ended"):
            patience.until_none(lambda: [1, 2], left, "all_reduce")
        with pytest.raises(LostPeerError, match=r"rank\(s\) 2 left .* in all_reduce"):
            patience.until_none(lambda: [2], left, "all_reduce")
        patience.close()


def test_too_little_memory_is_found_by_all_and_nothing_breaks() -> None:
    def work(comm: SharedMemoryCommunicator) -> None:
        with pytest.raises(SharedMemoryError, match="too little free memory"):
            comm.allocate(2**50, torch.float32)
        comm.barrier()

    on_ranks(2, work)
