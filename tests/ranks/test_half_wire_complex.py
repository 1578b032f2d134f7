"""Complex gradients over a 16-bit wire keep both parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding."""


def gradient(rank: int, dtype: Any, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    parts = 0.5 + torch.rand(100, 2, generator=generator, dtype=torch.float64)
    parts[:, 1] *= -1000.0  # the larger one: it is what fp16 has to be scaled by
    return (torch.view_as_complex(parts) * size).to(dtype)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-9])
def test_both_parts_are_right_to_16_bits(name: str, dtype: Any, size: float) -> None:
    """Each part: W terms, each rounded once, and W-1 additions rounded, each by one unit of the sum
    of magnitudes. Parts are at most 3,000 times smaller than the largest: fp16 holds them all."""
    world_size = 2

    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = nn.ParameterList([nn.Parameter(torch.zeros(100, dtype=dtype))])
        sync = replicate(model, strategy=name, comm=ProcessGroupCommunicator(group))
        # The gradient of Re(p conj(g)) is g.
        (model[0] * gradient(rank, dtype, size).conj()).real.sum().backward()
        sync.close()
        return model[0].grad * world_size  # backward leaves the mean

    parts = torch.stack([torch.view_as_real(gradient(r, dtype, size)) for r in range(world_size)])
    bound = world_size * UNIT[name] * parts.abs().sum(0)
    first, second = run_thread_ranks(work, world_size)
    assert torch.equal(first, second)
    assert first.dtype == dtype
    assert bool(((torch.view_as_real(first) - parts.sum(0)).abs() <= bound).all())
    assert not torch.equal(torch.view_as_real(first), parts.sum(0))  # it did travel in 16 bits
