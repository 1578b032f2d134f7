"""Every communicator gives what the names promise, on 1..4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.values import all_sum, broadcast_json, broadcast_tensors
from gradsync.errors import RunError
from gradsync.world import World
from support.thread_ranks import run_thread_ranks


def on_ranks(world_size: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    """`fn(comm)` on every rank; one rank gets the communicator without a group."""
    if world_size == 1:
        return [fn(SingleCommunicator())]
    return run_thread_ranks(lambda _, group: fn(ProcessGroupCommunicator(group)), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(world_size: int) -> None:
    def work(comm: Communicator) -> dict[str, Any]:
        assert comm.world_size == world_size
        mine = torch.arange(3.0) + 10 * comm.rank
        result: dict[str, Any] = {}
        for op in ("sum", "min", "max"):
            tensor = mine.clone()
            comm.all_reduce(tensor, op).wait()
            result[op] = tensor.tolist()
        tensor = mine.clone()
        comm.broadcast(tensor, src=world_size - 1).wait()
        result["broadcast"] = tensor.tolist()
        gathered = torch.zeros(3 * world_size)
        comm.all_gather(gathered, mine).wait()
        result["all_gather"] = gathered.tolist()
        shard = torch.zeros(2)
        comm.reduce_scatter(shard, torch.arange(2.0 * world_size)).wait()
        result["reduce_scatter"] = shard.tolist()
        comm.barrier()
        return result

    results = on_ranks(world_size, work)
    shift = sum(10 * rank for rank in range(world_size))
    top = 10 * (world_size - 1)
    for rank, result in enumerate(results):
        assert result["sum"] == [shift, world_size + shift, 2 * world_size + shift]
        assert result["min"] == [0, 1, 2]
        assert result["max"] == [top, top + 1, top + 2]
        assert result["broadcast"] == [top, top + 1, top + 2]
        assert result["all_gather"] == [10 * r + i for r in range(world_size) for i in range(3)]
        assert result["reduce_scatter"] == [2 * rank * world_size, (2 * rank + 1) * world_size]


@pytest.mark.parametrize("world_size", [1, 3])
def test_small_values_travel_from_rank_0(world_size: int) -> None:
    value = {"path": "läuft/dir", "steps": [1, 2.5, None], "empty": ""}

    def work(comm: Communicator) -> Any:
        return broadcast_json(comm, value if comm.rank == 0 else "ignored")

    assert on_ranks(world_size, work) == [value] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_travel_bit_for_bit(world_size: int) -> None:
    sent = {
        "weights": torch.randn(3, 5),
        "half": torch.randn(4).bfloat16(),
        "step": torch.tensor(7.0),
        "counts": torch.arange(3),
        "transposed": torch.randn(2, 3).t(),
        "nothing": torch.zeros(0, 4),
    }

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return broadcast_tensors(comm, sent if comm.rank == 0 else None)

    for received in on_ranks(world_size, work):
        assert received.keys() == sent.keys()
        for name, tensor in sent.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)


def test_sums_of_numbers() -> None:
    sums = on_ranks(3, lambda comm: all_sum(comm, comm.rank, 0.1))
    assert sums == [(3.0, pytest.approx(0.3, abs=1e-15))] * 3


def test_several_ranks_need_a_group() -> None:
    assert isinstance(communicator(World()), SingleCommunicator)
    with pytest.raises(RunError, match="world size 2 but no process group"):
        communicator(World(world_size=2, local_world_size=2))
