"""`all_reduce` by dtype: what it takes it takes right, what it refuses it refuses on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm import reductions
from gradsync.comm.groups import RankPlacement
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import ALGORITHMS, all_reduce
from gradsync.comm.values import broadcast_tensors
from gradsync.errors import ConfigError
from support.thread_ranks import run_thread_ranks

UNEQUAL = RankPlacement((0, 0, 1))
MESSAGES = [name for name in ALGORITHMS if name != "backend"]


def on_three_ranks(algorithm: str, *cases: tuple[Any, Callable[[int], Tensor]]) -> Any:
    """For each (op, make) of `cases`: all ranks' `make(rank)` after the all-reduce.

    Hosts of 2 and 1 ranks.
    """

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        found = []
        for op, make in cases:
            tensor = make(rank)
            assert all_reduce(tensor, op, algorithm, comm=comm, hosts=UNEQUAL) is tensor
            found.append(tensor)
        return found

    return zip(*run_thread_ranks(work, 3), strict=True)


def conjugated(rank: int) -> Tensor:
    return torch.full((5,), complex(1 + rank, 2)).conj()


def negated(rank: int) -> Tensor:
    """Torch's lazy minus, as the imaginary part of a conjugate has it; here of 2 + rank."""
    return torch._neg_view(torch.full((5,), -2.0 - rank))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lazy_conjugates_and_minuses(algorithm: str) -> None:
    cases = (("sum", conjugated), ("mean", conjugated), ("max", negated))
    sums, means, largest = on_three_ranks(algorithm, *cases)
    for total, mean, most in zip(sums, means, largest, strict=True):
        assert total.is_conj()
        assert total.tolist() == [6 - 6j] * 5
        assert mean.tolist() == [2 - 2j] * 5
        assert most.is_neg()
        assert most.tolist() == [4.0] * 5


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_refused_on_all_ranks_alike(algorithm: str) -> None:
    """The ranks go on and understand each other: nothing is left on the way."""
    cases: list[tuple[Any, torch.dtype]] = [("min", torch.complex64), ("mean", torch.int64)]
    cases += [("sum", torch.float8_e4m3fn), ("sum", torch.uint16)]

    def work(rank: int, group: dist.ProcessGroup) -> list[tuple[str, float]]:
        comm = ProcessGroupCommunicator(group)
        options: dict[str, Any] = {"comm": comm, "hosts": UNEQUAL}
        found = []
        for op, dtype in cases:
            with pytest.raises((ConfigError, RuntimeError)) as caught:
                all_reduce(torch.ones(4).to(dtype), op, algorithm, **options)
            total = float(all_reduce(torch.ones(1), "sum", algorithm, **options))
            found.append((str(caught.value), total))
        return found

    for of_rank in run_thread_ranks(work, 3):
        for (op, dtype), (message, total) in zip(cases, of_rank, strict=True):
            if algorithm != "backend" or op == "mean":  # else it is Gloo that refuses
                assert re.match(rf"all_reduce .*'{algorithm}', op='{op}' .*{dtype}", message)
                assert "\n" not in message
            assert total == 3.0


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError])
def test_torch_may_refuse_with_any_of_these(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 raises TypeError for `minimum` of complex numbers, earlier ones RuntimeError."""

    def refuse(*_: object, **__: object) -> None:
        raise kind("not implemented")

    monkeypatch.setitem(reductions.COMBINE, "min", refuse)
    with pytest.raises(ConfigError, match=r"'ring', op='min' .*not implemented"):
        all_reduce(torch.ones(1), "min", "ring")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sparse_tensors_are_refused(algorithm: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{algorithm}', op='sum' .* torch.sparse_coo: only dense"
    ):
        all_reduce(torch.eye(3).to_sparse(), "sum", algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_the_docstring_promises(algorithm: str) -> None:
    """Small integers wrap around, a sum of bool is `or`, complex numbers have sum and mean."""
    cases: list[tuple[str, Callable[[int], Tensor]]] = []
    expected: list[Tensor] = []
    integers = [torch.int8, torch.uint8, torch.int32, torch.int64]
    for dtype in integers if algorithm == "backend" else [*integers, torch.int16]:
        cases.append(("sum", lambda _, dtype=dtype: torch.full((4,), 100, dtype=dtype)))
        expected.append(torch.full((4,), 300).to(dtype))
    for op, both in (("sum", [False, True]), ("min", [False, False]), ("max", [False, True])):
        cases.append((op, lambda rank: torch.tensor([False, rank > 0])))
        expected.append(torch.tensor(both))
    for dtype in (torch.complex64, torch.complex128):
        cases.append(("mean", lambda r, dtype=dtype: torch.full((4,), 1 + r * 1j).to(dtype)))
        expected.append(torch.full((4,), 1 + 1j).to(dtype))
    for (op, _), right, found in zip(
        cases, expected, on_three_ranks(algorithm, *cases), strict=True
    ):
        for tensor in found:
            assert torch.equal(tensor, right), (op, right.dtype)


@pytest.mark.parametrize("algorithm", MESSAGES)
def test_a_nan_of_any_rank_is_kept(algorithm: str) -> None:
    """Unlike Gloo, which keeps it or not by the order in which it compares."""

    def one_each(rank: int) -> Tensor:
        values = torch.ones(4)
        values[rank] = float("nan")
        return values

    for found in on_three_ranks(algorithm, ("min", one_each), ("max", one_each)):
        for tensor in found:
            assert tensor.isnan().tolist() == [True, True, True, False]
