"""`all_reduce` on its own: what it refuses, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.groups import RankPlacement, SingleCommunicator, communicator, group
from gradsync.comm.reductions import ALGORITHMS, all_reduce
from gradsync.errors import ConfigError, RunError
from gradsync.world import World
from support.recording import RecordingCommunicator


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_one_rank_without_a_process_group(algorithm: str, op: Any) -> None:
    tensor = torch.randn(3, 4)
    before = tensor.clone()
    assert all_reduce(tensor, op, algorithm=algorithm) is tensor
    assert torch.equal(tensor, before)
    assert all_reduce(tensor, op, algorithm=algorithm, world=World()) is tensor
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rign"}, "unknown algorithm 'rign'; perhaps you meant 'ring'"),
        ({"algorithm": "nccl"}, "unknown algorithm 'nccl' .there are: backend, ring, hierarchical"),
        ({"op": "men"}, "unknown op 'men'; perhaps you meant 'mean' .there are: sum, mean, min,"),
    ],
)
def test_unknown_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        all_reduce(torch.ones(1), **options)


@pytest.mark.parametrize("number", [2.0, 3, [1.0]])
def test_a_number_is_no_tensor(number: Any) -> None:
    with pytest.raises(ConfigError, match=f"in place.* got {type(number).__name__}: use"):
        all_reduce(number, "mean")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp(dist.ReduceOp.MIN), "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.AVG, "sum"),
        ("AVG", "sum"),
    ],
    ids=["SUM", "an object", "MAX", "AVG", "text"],
)
def test_the_ops_of_torch(op: Any, expected: str) -> None:
    class Noting(SingleCommunicator):
        def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> Any:
            assert op == expected
            return super().all_reduce(tensor, op)

    assert all_reduce(torch.ones(2), op, comm=Noting()).tolist() == [1, 1]
    for refused in (dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR):
        with pytest.raises(
            ConfigError, match=f"unknown op '{refused.name.lower()}'.* sum, mean, min, max"
        ):
            all_reduce(torch.ones(1), refused)


def test_a_tensor_that_is_not_contiguous_is_filled_in_place() -> None:
    class Doubling(SingleCommunicator):
        """Something that visibly changes the tensor."""

        def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> Any:
            assert tensor.is_contiguous()
            tensor.mul_(2)
            return super().all_reduce(tensor, op)

    base = torch.arange(12.0).reshape(3, 4)
    expected = base.clone()
    expected[:, 1] *= 2
    all_reduce(base[:, 1], comm=Doubling())
    assert torch.equal(base, expected)
    weight = torch.ones(2, requires_grad=True)
    assert all_reduce(weight, comm=Doubling()).tolist() == [2, 2]
    assert weight.requires_grad


def test_the_given_communicator_is_used() -> None:
    comm = RecordingCommunicator(SingleCommunicator())
    all_reduce(torch.ones(3), "max", comm=comm)
    assert comm.operations == {"all_reduce": 1}


def test_groups_of_one_rank() -> None:
    alone = group([0])
    assert alone is not None
    assert alone.world_size == 1
    with pytest.raises(ConfigError, match=r"0\.\.0, each once; got \[0, 1\] .there is no process"):
        group([0, 1])
    world = World(world_size=2, local_world_size=2)
    with pytest.raises(RunError, match="no process group"):
        all_reduce(torch.ones(1), world=world)
    assert isinstance(communicator(World()), SingleCommunicator)


def test_placement() -> None:
    """By place in the node."""
    places = RankPlacement((1, 0, 0, 1, 2))
    assert places.nodes == [[1, 2], [0, 3], [4]]
