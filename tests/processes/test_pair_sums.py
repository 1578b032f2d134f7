"""Whole sums of two ranks go by one all-reduce, on a group of its own, where bits allow it."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync as gs
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.rank_session import open_session

LARGE = 1000
"""Elements of a message that must be a bucket's."""
CASES: dict[str, tuple[str, tuple[int, ...], torch.dtype, bool]] = {
    "one leaf each": ("invariant", (1, 1), torch.float32, True),
    "two leaves each": ("invariant", (2, 2), torch.float64, True),
    "any order": ("bucketed", (2, 1), torch.float32, True),
    "16 bits": ("invariant", (1, 1), torch.bfloat16, False),
    "three leaves": ("invariant", (2, 1), torch.float32, False),
    "no leaf": ("invariant", (1, 0), torch.float32, False),
    "rounded nodes": ("invariant_bf16", (1, 1), torch.float32, False),
}


class Net(nn.Module):
    read_after: ClassVar[dict[str, str]] = {}

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 300), nn.Linear(300, 6)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def leaf(model: nn.Module, number: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
    return model(x).square().sum()


def step(model: Any, sync: Any, leaves: range, dtype: torch.dtype) -> None:
    for number in leaves:
        with sync.micro_step(last=number == leaves[-1], index=number):
            sync.backward(leaf(model, number, dtype), weight=4, reduction="sum")


def trained(world: Any, case: str) -> tuple[list[Tensor], list[int]]:
    """Weights after two steps, and sizes of the all-reduces that are not the default group's."""
    name, counts, dtype, _ = CASES[case]
    if world.world_size == 1:
        counts = (sum(counts),)
    first = sum(counts[: world.rank])
    leaves, sizes = range(first, first + counts[world.rank]), []
    real = ProcessGroupCommunicator.all_reduce

    def noted(self: Any, tensor: Tensor, op: Any = "sum") -> Any:
        if self.group is not dist.group.WORLD:
            sizes.append(tensor.numel())
        return real(self, tensor, op)

    model = Net(dtype)
    sync = gs.replicate(model, world, strategy=name, collective="backend", overlap_publish="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with patch.object(ProcessGroupCommunicator, "all_reduce", noted):
        for _ in range(2):
            step(model, sync, leaves, dtype)
            sync.step(optimizer, clip_norm=0.5)
    found = [p.detach().clone() for p in model.parameters()]
    sync.close()
    return found, sizes


def _all_cases(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    with open_session(rank, world_size, store_path) as world:
        return {case: trained(world, case) for case in CASES}


def test_an_all_reduce_where_its_order_is_the_trees(pool: Any) -> None:
    ranks, (alone,) = pool.run(_all_cases, 2), pool.run(_all_cases, 1)
    for case, (name, _, _, by_all_reduce) in CASES.items():
        for found in ranks:
            weights, sizes = found[case]
            assert (max(sizes, default=0) > LARGE) == by_all_reduce, case
            if name != "bucketed":
                assert all(map(torch.equal, weights, alone[case][0])), case


def _two_models(rank: int, world_size: int, store_path: str) -> list[float]:
    """Rank 1 has no leaf of the first model and does not use all of the second, whose buckets it
    launches in the step; the program's own sum, of a bucket's size, comes before that."""
    with open_session(rank, world_size, store_path) as world:
        models = [Net(torch.float32), Net(torch.float32)]
        options = {"strategy": "invariant", "collective": "backend"}
        handles = [gs.replicate(model, world, **options) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        step(models[0], handles[0], range(1 - rank), torch.float32)
        with handles[1].micro_step(last=True, index=rank):
            x = torch.ones(4, 6)
            used = models[1](x) if rank == 0 else models[1].first(x)
            handles[1].backward(used.square().sum(), weight=4, reduction="sum")
        reducer: Any = handles[1].reducer
        for work in reducer._works:
            work.works[0].wait()  # its all-reduce is under way
        metric = torch.full((reducer.buckets[0].plan.numel,), float(rank + 1))
        dist.all_reduce(metric)
        for handle, optimizer in zip(handles, optimizers, strict=True):
            handle.step(optimizer)
        found = [float(p.sum()) for model in models for p in model.parameters()]
        for handle in handles:
            handle.close()
        return [float(metric.mean()), *found]


@pytest.mark.timeout(60)
def test_sums_stay_apart_from_the_programs_collectives(pool: Any) -> None:
    first, second = pool.run(_two_models, 2)
    assert first == second
    assert first[0] == 3.0
