"""A small problem for strategies whose ranks step alone, and its oracle: W replicas in plain loops.

The oracle knows no communicator and no reducer: replicas are a list, the mean is a sum over it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.periodic import AloneReducer, PeriodicReplicas
from gradsync.sync.step import Optimizers, StepResult
from support.thread_ranks import run_thread_ranks

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Meet = Callable[[list[nn.Module], dict[str, Any]], None]
"""`meet(replicas, memory)` makes all replicas equal; `memory` begins with the start."""


@dataclass(frozen=True)
class Shares:
    """Who has which leaf: rank r has leaves r, r + W, …, of which some are all padding."""

    num_leaves: int
    padding: tuple[int, ...] = ()

    def of(self, rank: int, world_size: int) -> list[int]:
        return list(range(rank, self.num_leaves, world_size))

    def weight(self, index: int) -> int:
        return 0 if index in self.padding else 2 + index % 3


def small_model() -> nn.Module:
    """Two layers, one frozen parameter, no buffers."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(7)  # ranks are threads: no global seed
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    model[0].bias.requires_grad_(False)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trainable(model), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trainable(model), lr=0.03, weight_decay=0.1)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def leaf_loss(model: nn.Module, step: int, index: int, shares: Shares) -> Tensor:
    """The leaf's loss, summed over its samples; 0 for padding."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x_BC = torch.randn(2 + index % 3, 5, generator=generator)
    loss = (model(x_BC) - x_BC[:, :3]).square().sum()
    return loss if shares.weight(index) else 0.0 * loss


def train(
    sync: GradientSync, optimizer: Optimizers, steps: Sequence[int], shares: Shares
) -> list[StepResult]:
    """What a user's loop does, on one rank."""
    results = []
    for step in steps:
        for index in shares.of(sync.comm.rank, sync.comm.world_size):
            loss = leaf_loss(sync.model, step, index, shares)
            sync.backward(loss, weight=shares.weight(index))
        results.append(sync.step(optimizer))
    return results


def alone(shards: PeriodicReplicas, comm: Communicator) -> GradientSync:
    """A handle whose ranks step alone."""
    return GradientSync(shards.model, comm, AloneReducer(shards.model, comm, shards))


def run_rounds(
    comm: Communicator,
    make: Callable[[nn.Module, Communicator], PeriodicReplicas],
    make_optimizer: MakeOptimizer,
    steps: int,
    shares: Shares,
) -> dict[str, Tensor]:
    """Train, end the last round, and return the weights."""
    model = small_model()
    sync = alone(make(model, comm), comm)
    train(sync, make_optimizer(model), range(steps), shares)
    sync.synchronize_replicas()
    return weights_of(model)


def check_rounds(
    world_size: int,
    make: Callable[[nn.Module, Communicator], PeriodicReplicas],
    meet: Meet,
    make_optimizer: MakeOptimizer,
    shares: Shares,
    *,
    steps: int,
    inner_steps: int,
    exact_up_to: int,
) -> None:
    """Compare ranks as threads with the oracle; see `assert_same`."""
    oracle = replicas_in_plain_loops(world_size, meet, make_optimizer, steps, inner_steps, shares)
    results = run_thread_ranks(
        lambda _, group: run_rounds(
            ProcessGroupCommunicator(group), make, make_optimizer, steps, shares
        ),
        world_size,
    )
    assert_same(results, oracle, exact_up_to=exact_up_to)


def replicas_in_plain_loops(
    world_size: int,
    meet: Meet,
    make_optimizer: MakeOptimizer,
    steps: int,
    inner_steps: int,
    shares: Shares,
) -> dict[str, Tensor]:
    """The oracle."""
    replicas = [small_model() for _ in range(world_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    memory: dict[str, Any] = {"start": copy.deepcopy(replicas[0])}
    for step in range(steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            step_alone(replica, optimizer, step, shares.of(rank, world_size), shares)
        if (step + 1) % inner_steps == 0 or step + 1 == steps:
            meet(replicas, memory)
    return weights_of(replicas[0])


def step_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    leaves: Sequence[int],
    shares: Shares,
) -> None:
    """One step of one replica on the mean gradient of its own leaves, if it has any."""
    weight = sum(shares.weight(index) for index in leaves)
    for index in leaves:
        leaf_loss(model, step, index, shares).backward()
    if weight:
        for parameter in _trainable(model):
            assert parameter.grad is not None
            parameter.grad.mul_(1 / weight)
        optimizer.step()
    optimizer.zero_grad()


def mean_of(replicas: list[nn.Module], name: str) -> Tensor:
    """One parameter's mean, added up in rank order."""
    total = torch.zeros(())
    for replica in replicas:
        total = total + replica.get_parameter(name).detach()
    return total / len(replicas)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(
    results: list[dict[str, Tensor]], oracle: dict[str, Tensor], *, exact_up_to: int
) -> None:
    """All ranks hold the same bits, and the oracle's to rounding; exactly, on so few ranks."""
    for result in results:
        assert result.keys() == oracle.keys()
        for name, tensor in oracle.items():
            assert torch.equal(result[name], results[0][name]), name
            if len(results) <= exact_up_to:
                assert torch.equal(result[name], tensor), name
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)
