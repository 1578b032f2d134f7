"""Inputs and expectations for tests of all-reduce algorithms."""

from __future__ import annotations

import torch
from torch import Tensor

OPS = ("sum", "min", "max")
INTEGERS = (torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def lengths(world_size: int) -> list[int]:
    """Shorter than the ranks, just around, and long, prime and not."""
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000, 70_001})


def rank_input(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """What `rank` contributes; every rank can compute every other's."""
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
