"""`all_reduce` by dtype: what it takes it takes right, what it refuses it refuses on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.placement import Placement
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import ALGORITHMS, all_reduce
from gradsync.comm.values import broadcast_tensors
from gradsync.errors import ConfigError
from support.engine_cases import groups_of
from support.thread_ranks import run_thread_ranks

UNEQUAL = Placement(((0, 0), (0, 1), (1, 0)))
MESSAGES = [name for name in ALGORITHMS if name != "backend"]


def on_three_ranks(algorithm: str, op: Any, make: Callable[[int], Tensor]) -> list[Tensor]:
    """Each rank's `make(rank)` after the all-reduce, hosts of 2 and 1 ranks."""

    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        comm = ProcessGroupCommunicator(group)
        tensor = make(rank)
        assert all_reduce(tensor, op, algorithm, comm=comm, groups=groups_of(comm, UNEQUAL)) is (
            tensor
        )
        return tensor

    return run_thread_ranks(work, 3)


def conjugated(rank: int) -> Tensor:
    return torch.full((5,), complex(1 + rank, 2)).conj()


def negated(rank: int) -> Tensor:
    """Torch's lazy minus, as the imaginary part of a conjugate has it; here of 2 + rank."""
    return torch._neg_view(torch.full((5,), -2.0 - rank))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lazy_conjugates(algorithm: str) -> None:
    for tensor in on_three_ranks(algorithm, "sum", conjugated):
        assert tensor.is_conj()
        assert tensor.tolist() == [6 - 6j] * 5
    for tensor in on_three_ranks(algorithm, "mean", conjugated):
        assert tensor.tolist() == [2 - 2j] * 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lazy_minus(algorithm: str) -> None:
    for tensor in on_three_ranks(algorithm, "max", negated):
        assert tensor.is_neg()
        assert tensor.tolist() == [4.0] * 5


def test_a_communicator_takes_lazy_tensors_too() -> None:
    """A gradient may be one: autograd conjugates lazily."""

    def work(rank: int, group: dist.ProcessGroup) -> list[Any]:
        comm = ProcessGroupCommunicator(group)
        total, copied = conjugated(rank), torch.full((2,), complex(rank, rank))
        copied = copied.conj() if rank else copied
        comm.all_reduce(total).wait()
        comm.broadcast(copied, src=1).wait()
        gathered, scattered = torch.zeros(10), torch.zeros(5)
        comm.all_gather(gathered, negated(rank)).wait()
        comm.reduce_scatter(scattered, torch._neg_view(torch.ones(10))).wait()
        named = broadcast_tensors(comm, {"a": negated(0), "b": conjugated(0)} if not rank else None)
        assert torch.equal(named["a"], negated(0))
        assert torch.equal(named["b"], conjugated(0))
        return [total.tolist(), copied.tolist(), gathered.tolist(), scattered.tolist()]

    for total, copied, gathered, scattered in run_thread_ranks(work, 2):
        assert total == [3 - 4j] * 5
        assert copied == [1 - 1j] * 2
        assert gathered == [2.0] * 5 + [3.0] * 5
        assert scattered == [-2.0] * 5


@pytest.mark.parametrize(
    ("algorithm", "op", "dtype"),
    [
        *((algorithm, op, torch.complex64) for algorithm in ALGORITHMS for op in ("min", "max")),
        *((algorithm, "sum", torch.float8_e4m3fn) for algorithm in ALGORITHMS),
        *((algorithm, "mean", torch.float8_e5m2) for algorithm in MESSAGES),
        *((algorithm, "max", torch.uint16) for algorithm in ALGORITHMS),
        ("backend", "sum", torch.int16),
    ],
    ids=str,
)
def test_refused_on_all_ranks_before_a_message(algorithm: str, op: Any, dtype: Any) -> None:
    """The ranks go on and understand each other: nothing is left on the way."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        comm = ProcessGroupCommunicator(group)
        options: dict[str, Any] = {"comm": comm, "groups": groups_of(comm, UNEQUAL)}
        with pytest.raises(ConfigError) as caught:
            all_reduce(torch.ones(4).to(dtype), op, algorithm, **options)
        return str(caught.value), float(all_reduce(torch.ones(1), "sum", algorithm, **options))

    for message, total in run_thread_ranks(work, 3):
        assert re.match(rf"all_reduce .*algorithm='{algorithm}'.*op='{op}'.*{dtype}", message)
        assert "\n" not in message
        assert total == 3.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sparse_tensors_are_refused(algorithm: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{algorithm}', op='sum' .* torch.sparse_coo: only dense"
    ):
        all_reduce(torch.eye(3).to_sparse(), "sum", algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_the_docstring_promises(algorithm: str) -> None:
    """Small integers wrap around, a sum of bool is `or`, complex numbers have sum and mean."""
    integers = [torch.int8, torch.uint8, torch.int32, torch.int64]
    for dtype in integers if algorithm == "backend" else [*integers, torch.int16]:
        for tensor in on_three_ranks(
            algorithm, "sum", lambda rank, dtype=dtype: torch.full((4,), 100, dtype=dtype)
        ):
            assert torch.equal(tensor, torch.full((4,), 300).to(dtype))
    for op, expected in (("sum", [False, True]), ("min", [False, False]), ("max", [False, True])):
        for tensor in on_three_ranks(algorithm, op, lambda rank: torch.tensor([False, rank > 0])):
            assert tensor.tolist() == expected
    for dtype in (torch.complex64, torch.complex128):
        for tensor in on_three_ranks(
            algorithm, "mean", lambda rank, dtype=dtype: torch.full((4,), 1 + rank * 1j).to(dtype)
        ):
            assert tensor.tolist() == [1 + 1j] * 4


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("algorithm", MESSAGES)
def test_a_nan_of_any_rank_is_kept(algorithm: str, op: str) -> None:
    """Unlike Gloo, which keeps it or not by the order in which it compares."""

    def one_each(rank: int) -> Tensor:
        values = torch.ones(4)
        values[rank] = float("nan")
        return values

    for tensor in on_three_ranks(algorithm, op, one_each):
        assert tensor.isnan().tolist() == [True, True, True, False]
