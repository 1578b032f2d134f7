"""The sharded optimizer in a loop of the user's own, with nothing else of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer
from support.rank_session import open_session


def _train(rank: int, world_size: int, store_path: str, sharded: str) -> dict[str, Tensor]:
    with open_session(rank, world_size, store_path) as world:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 5))
        )
        optimizer: torch.optim.Optimizer
        if sharded == "no":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        else:
            where = {"world": world} if sharded == "world" else {}
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, **where)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(4):
            model(torch.full((2, 9), float(rank + step))).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if isinstance(optimizer, ShardedOptimizer):
            state_bytes = 2 * 4 * (9 * 31 + 31 + 31 * 5 + 5)
            assert optimizer.state_bytes < state_bytes
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("sharded", ["default group", "world"])
def test_same_bits_as_the_whole_optimizer(pool: Any, sharded: str) -> None:
    expected = pool.run(_train, 3, "no")[0]
    for got in pool.run(_train, 3, sharded):
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor)
