"""The course's names in the course's loop, against one process with the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.compat import course
from support.rank_session import open_session


def _train(rank: int, world_size: int, store_path: str, kind: str) -> dict[str, Tensor]:
    session = open_session(rank, world_size, store_path) if world_size > 1 else None
    with session or contextlib.nullcontext():
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 6))
        module[3].weight.requires_grad_(False)
        wrapped: nn.Module = module
        if world_size > 1:
            individual = kind == "individual"
            wrapped = (
                course.get_ddp_individual_parameters(module)
                if individual
                else course.get_ddp_bucketed(module, 0.0001)
            )
            after_backward = (
                course.ddp_individual_parameters_on_after_backward
                if individual
                else course.ddp_bucketed_on_after_backward
            )
        optimizer: torch.optim.Optimizer
        if kind == "sharded" and world_size > 1:
            optimizer = course.get_sharded_optimizer(
                wrapped.parameters(), torch.optim.AdamW, lr=0.05
            )
        else:
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
        for step in range(4):
            x_BC = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
            mine = x_BC.chunk(world_size)[rank]
            optimizer.zero_grad()
            if world_size > 1:
                course.ddp_bucketed_on_train_batch_start(wrapped, optimizer)
            F.mse_loss(wrapped(mine), mine.sin()).backward()
            if world_size > 1:
                after_backward(wrapped, optimizer)
            optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["individual", "bucketed", "sharded"])
def test_equals_one_process(pool: Any, kind: str, world_size: int) -> None:
    oracle = _train(0, 1, "", kind)
    results = pool.run(_train, world_size, kind)
    for result in results:
        for name, tensor in oracle.items():
            assert torch.equal(result[name], results[0][name])
            torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-6)
