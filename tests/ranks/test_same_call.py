"""Ranks that do not call the same collective: refused on all of them, and nothing is combined."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.reductions import ALGORITHMS, all_reduce
from gradsync.comm.shared_memory.communicator import share_memory
from gradsync.errors import RunError
from support.thread_ranks import run_thread_ranks


def refusals(calls: list[Callable[[Any], Any]], *, shared: bool = False) -> list[str]:
    """The error of each rank when every one makes another of the `calls`."""

    def work(rank: int, group: dist.ProcessGroup) -> str:
        base = ProcessGroupCommunicator(group)
        comm = share_memory(base) if shared else base
        with pytest.raises(RunError) as caught:
            calls[rank](comm)
        assert float(all_reduce(torch.ones(1), comm=comm)) == len(calls)  # nothing is on the way
        if shared:
            comm.close()
        return str(caught.value)

    return run_thread_ranks(work, len(calls))


def reduce_a(comm: Any, tensor: Tensor, **options: Any) -> Tensor:
    return all_reduce(tensor, comm=comm, **options)


def reduce_b(comm: Any, tensor: Tensor, **options: Any) -> Tensor:
    return all_reduce(tensor, comm=comm, **options)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "shared memory"])
def test_swapped_tensors_of_one_shape(algorithm: str) -> None:
    """The lines tell them apart; in one line the names do."""
    shared = algorithm == "shared memory"
    options = {"algorithm": "backend" if shared else algorithm}
    a, b = torch.ones(1), torch.full((1,), 100.0)
    lines = refusals(
        [lambda c: reduce_a(c, a, **options), lambda c: reduce_b(c, b, **options)], shared=shared
    )
    assert lines[0] == lines[1]
    assert "rank 0: all_reduce (sum, " in lines[0]
    assert "at test_same_call.py:" in lines[0]
    assert "in reduce_a; rank 1: " in lines[0]
    assert "give it one name= there" in lines[0]
    (named, _) = refusals(
        [lambda c, n=n: reduce_a(c, a, name=n, **options) for n in ("loss", "norm")], shared=shared
    )
    assert "[1] on cpu named 'loss'; rank 1: " in named
    assert (float(a), float(b)) == (1.0, 100.0)


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ((torch.ones(4), "sum"), (torch.ones(4, dtype=torch.int32), "sum")),
        ((torch.ones(4), "sum"), (torch.ones(5), "sum")),
        ((torch.ones(2, 3), "sum"), (torch.ones(3, 2), "sum")),
        ((torch.ones(4), "sum"), (torch.ones(4), "max")),
        ((torch.ones(4), "mean"), (torch.ones(4, dtype=torch.int64), "mean")),  # refused alone
    ],
    ids=["dtype", "length", "shape", "op", "refused on one rank"],
)
def test_shape_dtype_and_op(mine: tuple[Tensor, Any], others: tuple[Tensor, Any]) -> None:
    calls = [lambda c, t=t, op=op: reduce_a(c, t, op=op) for t, op in (mine, others, others)]
    told = refusals(calls)
    assert told[0] == told[1] == told[2]
    assert "rank 0: all_reduce" in told[0]
    assert "rank 1, 2: all_reduce" in told[0]
    assert "one shape and dtype, with one op" in told[0]


def test_one_name_joins_two_lines_and_one_line_has_one_place() -> None:
    """Also when hosts keep the file in different folders."""

    def work(rank: int, group: dist.ProcessGroup) -> list[float]:
        comm = ProcessGroupCommunicator(group)
        own = reduce_b if rank else reduce_a
        code = reduce_a.__code__.replace(co_filename=f"/home/{rank}/train.py")
        fit = FunctionType(code, globals())
        found = [own(comm, torch.ones(1), name="loss"), fit(comm, torch.ones(1))]
        found += [reduce_a(comm, torch.full((1,), float(number))) for number in range(2)]
        return [float(tensor) for tensor in found]

    assert run_thread_ranks(work, 2) == [[2.0, 2.0, 0.0, 2.0]] * 2


@pytest.mark.parametrize(
    "calls",
    [
        [lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4).int())],
        [lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4), "max")],
        [lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(4), 1)],
        [lambda c: c.broadcast(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4))],
        [
            lambda c: c.all_gather(torch.ones(8), torch.ones(4)),
            lambda c: c.all_gather(torch.ones(10), torch.ones(5)),
        ],
        [
            lambda c: c.reduce_scatter(torch.ones(2), torch.ones(4)),
            lambda c: c.reduce_scatter(torch.ones(2).int(), torch.ones(4).int()),
        ],
    ],
    ids=["dtype", "op", "src", "operation", "length", "reduce_scatter"],
)
def test_a_group_of_the_users_own(calls: list[Callable[[Any], Any]]) -> None:
    def checked(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda comm: call(ProcessGroupCommunicator(comm.group, checked=True))

    told = refusals([checked(call) for call in calls])
    assert told[0] == told[1]
    assert "rank 0: " in told[0]
