"""The phases of a step, one contract each, under every strategy that runs on threads.

What each phase promises (see sync/reducer.py) is compared with sums over all ranks made by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import pretend_hosts
from support.thread_ranks import run_thread_ranks

WORLD_SIZE = 2
ON_PROCESSES = ("ddp", "powersgd", "fsdp")
"""Torch's own, which threads cannot run; `test_sync_strategies` has their phases."""
CLIP = 0.05
TOLERANCE = {"bf16": 2e-2, "invariant_bf16": 2e-2, "fp16": 2e-3}


class Phases(NamedTuple):
    """One step of one rank."""

    own: list[Tensor]
    """Sum over this rank's leaves, from plain autograd."""
    weight: float
    used: list[bool]
    """From `Reducer.launch`."""
    mean: list[Tensor | None]
    """From `whole_gradients`, when `reduce` has returned."""
    owned: int
    """Elements of `owned()` then."""
    norm: float
    clipped: list[Tensor | None]
    published: list[Tensor]
    """Weights when `publish`'s work is done."""


def net() -> nn.Module:
    model = nn.ModuleList([nn.Linear(40, 30), nn.Linear(30, 4, bias=False), nn.Linear(3, 3)])
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model  # the last layer is never used


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    x = torch.randn(2 + leaf, 40, generator=torch.Generator().manual_seed(leaf))
    return model[1](torch.tanh(model[0](x))).square().sum()


def one_step(rank: int, group: dist.ProcessGroup, name: str) -> Phases:
    comm, model, plain = ProcessGroupCommunicator(group), net(), net()
    hosts: dict[str, Any] = {"hosts": pretend_hosts(comm, 1)} if name == "hierarchical" else {}
    sync = replicate(model, strategy=name, comm=comm, **hosts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer, shards, found = sync.reducer, sync.reducer.shards, {}
    launch, reduce, clip, publish = reducer.launch, reducer.reduce, shards.clip, shards.publish

    def copies() -> list[Tensor | None]:
        return [None if g is None else g.clone() for g in shards.whole_gradients()]

    def launched() -> list[bool]:
        found["used"] = launch()
        return found["used"]

    def reduced(used: list[bool], divisor: float | None) -> Any:
        watch = reduce(used, divisor)
        found["mean"], found["owned"] = copies(), sum(g.numel() for g in shards.owned())
        return watch

    def clipped(max_norm: float) -> Tensor:
        norm = clip(max_norm)
        found["norm"], found["clipped"] = float(norm), copies()
        return norm

    def published() -> Any:
        work = publish()
        work.wait()
        found["published"] = [p.detach().clone() for p in model.parameters()]
        return work

    reducer.launch, reducer.reduce, shards.clip, shards.publish = (
        launched,
        reduced,
        clipped,
        published,
    )
    leaves = range(1) if rank == 0 else range(1, 3)
    for leaf in leaves:
        sync.backward(loss_of(model, leaf), weight=2 + leaf, reduction="sum")
        loss_of(plain, leaf).backward()
    sync.step(optimizer, clip_norm=CLIP)
    del reducer.launch, reducer.reduce, shards.clip, shards.publish
    sync.close()
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    return Phases(own=own, weight=sum(2.0 + leaf for leaf in leaves), **found)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ON_PROCESSES])
def test_each_phase_keeps_its_contract(name: str) -> None:
    ranks = run_thread_ranks(lambda rank, group: one_step(rank, group, name), WORLD_SIZE)
    alone = name in ("local_sgd", "diloco")
    weight = sum(rank.weight for rank in ranks)
    total = [sum(parts) / weight for parts in zip(*(rank.own for rank in ranks), strict=True)]
    numel = sum(p.numel() for p in net()[:2].parameters())
    for rank in ranks:
        # collect, launch: which parameters have a gradient here
        assert rank.used == [True, True, True, False, False]
        # reduce: the mean over the global batch, None where no rank has one
        mean = [own / rank.weight for own in rank.own] if alone else total
        assert [g is None for g in rank.mean] == [False] * 3 + [True] * 2
        for got, expected in zip(rank.mean[:3], mean[:3], strict=True):
            torch.testing.assert_close(
                got, expected, rtol=TOLERANCE.get(name, 1e-5), atol=TOLERANCE.get(name, 1e-6)
            )
        # clip: the norm of all of it; the gradient is scaled to the limit
        norm = float(torch.cat([g.flatten() for g in mean[:3]]).norm())
        assert rank.norm == pytest.approx(norm, rel=TOLERANCE.get(name, 1e-5))
        for got, before in zip(rank.clipped[:3], rank.mean[:3], strict=True):
            torch.testing.assert_close(got, before * min(1.0, CLIP / (rank.norm + 1e-6)))
        # update, publish: SGD with the clipped mean, the whole of it on every rank
        for got, start, gradient in zip(
            rank.published, net().parameters(), rank.clipped, strict=True
        ):
            if name != "diloco":
                expected = start if gradient is None else start - 0.1 * gradient
                torch.testing.assert_close(got, expected.detach())
    if not alone:
        assert all(map(torch.equal, ranks[0].published, ranks[1].published))
    # owned slices: everything, or parts that together are everything once, but for padding
    if all(rank.owned == numel for rank in ranks):
        return
    assert numel <= sum(rank.owned for rank in ranks) <= numel + 15 + 64 * WORLD_SIZE * 6
