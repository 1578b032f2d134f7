"""Communication hooks on a DDP that spans only some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.errors import ConfigError
from gradsync.sync.comm_hook import comm_hook
from support.rank_session import open_session


def _hierarchical_on_two_of_three(rank: int, world_size: int, store_path: str) -> str:
    """Rank 2 takes no part, so nothing may wait for it."""
    with open_session(rank, world_size, store_path, timeout_s=20.0):
        group = dist.new_group([0, 1])
        if rank == 2:
            return ""
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
        comm_hook("hierarchical").register(ddp)
        with pytest.raises(ConfigError) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        return str(caught.value)


def test_hierarchical_says_that_the_group_is_not_everybody(pool: Any) -> None:
    first, second, _ = pool.run(_hierarchical_on_two_of_three, 3)
    for message in (first, second):
        assert "the model's group has 2 of 3 ranks; give groups= that cover it" in message


def _tuple_with_group(rank: int, world_size: int, store_path: str) -> float:
    with open_session(rank, world_size, store_path):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        model, group = nn.Linear(1, 1, bias=False), groups[rank // 2]
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(*comm_hook("ring", group=group))
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        return float(model.weight.grad)


def test_registered_by_hand_it_averages_over_the_group_it_is_given(pool: Any) -> None:
    assert pool.run(_tuple_with_group, 4) == [0.5, 0.5, 2.5, 2.5]
