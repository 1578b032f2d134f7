"""Loops of one's own on thread ranks, and the mean gradients that they must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.engine_cases import global_random_state
from support.sync_cases import SmallNet
from support.thread_ranks import run_thread_ranks

OWN_LOOP = ("invariant", "bucketed", "naive")
WORLD_SIZE = 3

Loop = Callable[[int, GradientSync, torch.optim.Optimizer], Any]
"""(rank, handle, an SGD over all of the model's parameters) -> result."""


def x_of(rank: int, turn: int = 0) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * turn + rank))


def loss_of(model: nn.Module, rank: int, turn: int = 0, **named: Any) -> Tensor:
    return model(x_of(rank, turn), **named).square().mean()


def on_ranks(name: str, loop: Loop, *, timeout_s: float = 10.0, **options: Any) -> list[Any]:
    """Run a loop on three ranks that start with different weights."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        with global_random_state:
            torch.manual_seed(rank)
            model = SmallNet(branch=True)
        comm = ProcessGroupCommunicator(group)
        sync = replicate(model, sync=name, comm=comm, **options)
        try:
            return loop(rank, sync, torch.optim.SGD(model.parameters(), lr=0.1))
        finally:
            sync.close()

    return run_thread_ranks(work, WORLD_SIZE, timeout_s=timeout_s)


def start() -> SmallNet:
    """What all ranks have to start with: rank 0's weights."""
    with global_random_state:
        torch.manual_seed(0)
        return SmallNet(branch=True)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def mean_gradients(*turns: int, users: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor | None]:
    """What DDP defines: the sum over `turns`, averaged over all ranks; others bring zeros."""
    model = start()
    for rank in users:
        for turn in turns:
            (loss_of(model, rank, turn) / WORLD_SIZE).backward()
    return gradients(model)


def assert_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_replicas_equal(found: list[dict[str, Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)
