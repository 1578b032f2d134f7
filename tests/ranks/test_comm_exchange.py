"""Messages between pairs of ranks: matched in order, also beside collectives of another thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_everyone_to_everyone(world_size: int) -> None:
    """Two messages to each peer in one batch, of different lengths."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        peers = [peer for peer in range(world_size) if peer != rank]
        sends, receives = [], []
        for peer in peers:
            for length in (3, 1000):
                sends.append((torch.full((length,), 10.0 * rank + peer), peer))
                receives.append((torch.zeros(length), peer))
        comm.exchange(sends, receives).wait()
        for tensor, peer in receives:
            assert tensor.tolist() == [10.0 * peer + rank] * len(tensor)

    run_thread_ranks(work, world_size)


def test_messages_meet_in_order_however_they_are_batched() -> None:
    """Many in flight at once; one side posts them one by one, the other in one batch, late."""
    lengths = [1, 5000, 2, 70_000, 3, 1]

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        comm = ProcessGroupCommunicator(group)
        if rank == 0:
            tensors = [torch.full((length,), float(i)) for i, length in enumerate(lengths)]
            works = [comm.exchange([(tensor, 1)], []) for tensor in tensors]
            comm.barrier()
            for work in works:
                work.wait()
            return tensors
        tensors = [torch.zeros(length) for length in lengths]
        comm.barrier()
        comm.exchange([], [(tensor, 0) for tensor in tensors]).wait()
        return tensors

    sent, received = run_thread_ranks(work, 2)
    for one, other in zip(sent, received, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        mine = torch.arange(6).reshape(2, 3).add(rank).to(dtype)
        other = torch.zeros(2, 3, dtype=dtype)
        ProcessGroupCommunicator(group).exchange([(mine, 1 - rank)], [(other, 1 - rank)]).wait()
        return other

    for rank, other in enumerate(run_thread_ranks(work, 2)):
        assert torch.equal(other, torch.arange(6).reshape(2, 3).add(1 - rank).to(dtype))


def test_nothing_to_say() -> None:
    """Empty batches and empty tensors; and a rank that stays away."""

    def work(rank: int, group: dist.ProcessGroup) -> float:
        comm = ProcessGroupCommunicator(group)
        comm.exchange([], []).wait()
        empty, tensor = torch.zeros(0), torch.full((1,), float(rank))
        if rank < 2:
            peer = 1 - rank
            other = torch.zeros(1)
            comm.exchange(
                [(empty, peer), (tensor, peer)], [(torch.zeros(0), peer), (other, peer)]
            ).wait()
            return float(other)
        return -1.0

    assert run_thread_ranks(work, 3) == [1.0, 0.0, -1.0]
    SingleCommunicator().exchange([], []).wait()


def test_a_message_to_oneself_is_our_mistake() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        with pytest.raises(AssertionError, match="oneself"):
            comm.exchange([(torch.zeros(1), rank)], [])

    run_thread_ranks(work, 2)
    with pytest.raises(AssertionError, match="oneself"):
        SingleCommunicator().exchange([(torch.zeros(1), 0)], [])


def test_beside_collectives_of_another_thread() -> None:
    """What the engine does: messages in the background, collectives in front, one group."""
    rounds = 100

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        comm = ProcessGroupCommunicator(group)
        right, left = (rank + 1) % 3, (rank - 1) % 3
        failures: list[BaseException] = []

        def messages() -> None:
            try:
                for i in range(rounds):
                    other = torch.zeros(500)
                    mine = torch.full((500,), float(1000 * rank + i))
                    comm.exchange([(mine, right)], [(other, left)]).wait()
                    assert other.eq(1000 * left + i).all()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=messages)
        thread.start()
        for i in range(rounds):
            tensor = torch.full((300,), float(rank + i))
            comm.all_reduce(tensor).wait()
            assert tensor.eq(3 + 3 * i).all()
        thread.join()
        assert not failures, failures

    run_thread_ranks(work, 3)


def test_a_vanished_peer_fails_the_wait() -> None:
    errors: list[str] = []

    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        comm.barrier()
        if rank == 1:
            raise ValueError("gone")  # cuts the connections of all ranks
        try:
            comm.exchange([], [(torch.zeros(1), 1)]).wait()
        except RuntimeError as error:
            errors.append(str(error))

    with pytest.raises(ValueError, match="gone"):
        run_thread_ranks(work, 2)
    assert len(errors) == 1
