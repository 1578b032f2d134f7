"""Every communicator gives what the names promise; messages meet in order; values travel whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.values import all_sum, broadcast_json, broadcast_tensors, from_rank_0
from gradsync.errors import CheckpointError
from support.thread_ranks import run_thread_ranks


def on_ranks(world_size: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    """`fn(comm)` on every rank; one rank gets the communicator without a group."""
    if world_size == 1:
        return [fn(SingleCommunicator())]
    return run_thread_ranks(lambda _, group: fn(ProcessGroupCommunicator(group)), world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_travel_whole(world_size: int) -> None:
    value = {"path": "läuft/dir", "steps": [1, 2.5, None], "empty": ""}
    sent = {
        "weights": torch.randn(3, 5),
        "half": torch.randn(4).bfloat16(),
        "step": torch.tensor(7.0),
        "counts": torch.arange(3),
        "transposed": torch.randn(2, 3).t(),
        "nothing": torch.zeros(0, 4),
    }

    def work(comm: Communicator) -> Any:
        tensors = broadcast_tensors(comm, sent if comm.rank == 0 else None)
        told = broadcast_json(comm, value if comm.rank == 0 else "ignored")
        return told, tensors, all_sum(comm, comm.rank, 0.1)

    sums = (world_size * (world_size - 1) / 2, pytest.approx(0.1 * world_size, abs=1e-15))
    for told, received, summed in on_ranks(world_size, work):
        assert told == value
        assert summed == sums
        assert received.keys() == sent.keys()
        for name, tensor in sent.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0_answers_and_refuses_for_all(world_size: int) -> None:
    def refuse() -> None:
        raise CheckpointError("torn")

    def work(comm: Communicator) -> tuple[Any, str]:
        answer = from_rank_0(comm, lambda: {"rank": comm.rank})
        with pytest.raises(CheckpointError) as refused:
            from_rank_0(comm, refuse)
        return answer, str(refused.value)

    assert on_ranks(world_size, work) == [({"rank": 0}, "torn")] * world_size


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_everyone_to_everyone(world_size: int, dtype: torch.dtype) -> None:
    """Two messages to each peer in one batch, of different shapes."""

    def message(sender: int, receiver: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, (10 * sender + receiver) % 3).to(dtype)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        sends, receives = [], []
        for peer in range(world_size):
            for shape in ((3,), (2, 500)) if peer != rank else ():
                sends.append((message(rank, peer, shape), peer))
                receives.append((torch.zeros(shape, dtype=dtype), peer))
        comm.exchange(sends, receives).wait()
        for tensor, peer in receives:
            assert torch.equal(tensor, message(peer, rank, tuple(tensor.shape)))

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


def test_nothing_to_say_and_nobody_to_say_it_to() -> None:
    """Empty batches and empty tensors; a rank that stays away; a message to itself."""

    def work(rank: int, group: dist.ProcessGroup) -> float:
        comm = ProcessGroupCommunicator(group)
        comm.exchange([], []).wait()
        with pytest.raises(AssertionError, match="oneself"):
            comm.exchange([(torch.zeros(1), rank)], [])
        if rank == 2:
            return -1.0
        peer, other = 1 - rank, torch.zeros(1)
        sends = [(torch.zeros(0), peer), (torch.full((1,), float(rank)), peer)]
        comm.exchange(sends, [(torch.zeros(0), peer), (other, peer)]).wait()
        return float(other)

    assert run_thread_ranks(work, 3) == [1.0, 0.0, -1.0]
    SingleCommunicator().exchange([], []).wait()
    with pytest.raises(AssertionError, match="oneself"):
        SingleCommunicator().exchange([(torch.zeros(1), 0)], [])


def test_beside_collectives_of_another_thread() -> None:
    """The engine's use: messages in the background, collectives in front, one group."""
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
