"""Inputs and expectations for tests of all-reduce algorithms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.thread_ranks import run_thread_ranks

OPS = ("sum", "min", "max")
INTEGERS = (torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def lengths(world_size: int) -> list[int]:
    """Shorter than the ranks, just around, and long, prime and not."""
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000, 9001})


def rank_input(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """The input of `rank`; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator).to(dtype)
    return torch.randint(0, 20, (length,), generator=generator).to(dtype)


def check(result: Tensor, world_size: int, op: str) -> None:
    """Compare with plain torch over all ranks' inputs, in float64.

    Integers, min and max exactly. A sum of N terms in any order errs by at most
    (N-1) eps sum|x| at first order (Higham 2002, section 4.2); we allow no more.
    """
    inputs = torch.stack(
        [rank_input(rank, len(result), result.dtype).double() for rank in range(world_size)]
    )
    if op != "sum":
        expected = inputs.amin(0) if op == "min" else inputs.amax(0)
        assert torch.equal(result.double(), expected)
    elif not result.dtype.is_floating_point:
        assert torch.equal(result.double(), inputs.sum(0))
    else:
        # eps is twice the unit roundoff of the bound: that covers its second-order terms.
        bound = (world_size - 1) * torch.finfo(result.dtype).eps * inputs.abs().sum(0)
        error = (result.double() - inputs.sum(0)).abs()
        assert bool((error <= bound).all()), f"{float((error - bound).max())} too much"


def check_all(results: list[Tensor], op: str) -> None:
    """The right values on rank 0, and the same bits everywhere."""
    check(results[0], len(results), op)
    for result in results:
        assert torch.equal(result, results[0])


def check_algorithm(
    world_size: int, all_reduce: Callable[[Communicator, Tensor, str], None]
) -> None:
    """Check an in-place all-reduce for many lengths, dtypes and operations, on ranks as threads."""
    cases = [(n, torch.float32, "sum") for n in lengths(world_size)]
    cases += [(1000, dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in OPS]

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group) if world_size > 1 else SingleCommunicator()
        results = []
        for length, dtype, op in cases:
            tensor = rank_input(rank, length, dtype)
            all_reduce(comm, tensor, op)
            results.append(tensor)
        return results

    by_rank = run_thread_ranks(work, world_size)
    for i, (_, _, op) in enumerate(cases):
        check_all([results[i] for results in by_rank], op)
