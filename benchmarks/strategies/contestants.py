"""Contestants: every strategy of the registry, and "none", a loop without communication.

All train the same small GPT with AdamW, one leaf per rank and step, without clipping.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from wire import CountedCommunicator

from gradsync.comm.groups import RankPlacement, communicator
from gradsync.commands.models.config import GPTConfig, preset
from gradsync.commands.models.gpt import GPT, loss_sum
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.world import World

ALONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of the measurement."""

    width: int
    """Width of the model; heads have 64."""
    depth: int
    """Layers."""
    sequences: int
    """Sequences of a leaf."""
    tokens: int
    """Tokens of a sequence."""
    rounds: int
    """In each, every contestant has one turn; one more round before them is not recorded."""
    steps: int
    """Optimizer steps of a turn, one after the other."""
    bucket_mb: float
    """Size of buckets, MiB: the usual 25 would put such a small model into one."""
    only: tuple[str, ...] = ()
    """Strategies to measure; () means all."""

    def said(self, strategy: str) -> dict[str, Any]:
        """Options where defaults would show nothing in so few steps."""
        return {
            "local_sgd": {"inner_steps": self.steps},  # one meeting a turn
            "diloco": {"inner_steps": self.steps},
            "powersgd": {"start_powerSGD_iter": 2},  # compress from the first recorded step on
        }.get(strategy, {})

    def options(self, strategy: str) -> dict[str, Any]:
        """All options: also the size of buckets, where there are any."""
        known, recipe = STRATEGIES[strategy].options, STRATEGIES[strategy].recipe
        if "bucket_mb" in known and (recipe is None or recipe.grouping == "buckets"):
            return {"bucket_mb": self.bucket_mb, **self.said(strategy)}
        return self.said(strategy)

    @property
    def model(self) -> GPTConfig:
        """The `tiny` preset at another size."""
        return replace(
            preset("tiny"),
            n_embd=self.width,
            n_layer=self.depth,
            n_head=max(self.width // 64, 1),
            block_size=self.tokens,
        )

    def names(self) -> list[str]:
        """The contestants."""
        return [ALONE, *(self.only or STRATEGIES)]

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {name: value for name, value in asdict(self).items() if name != "only"}


class Contestant(Protocol):
    """Takes optimizer steps, in two halves, so that one may look in between."""

    surplus: int
    """See `CountedCommunicator.surplus`."""

    def backward(self, tokens_BT: Tensor, targets_BT: Tensor) -> None:
        """Forward and backward of this rank's leaf."""
        ...

    def update(self) -> float:
        """The rest of the step; returns communication that nothing hid, seconds."""
        ...

    def close(self) -> None:
        """Give back hooks and threads."""
        ...


class Alone:
    """The ideal: plain torch on this rank's leaf, nothing else."""

    surplus = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.weight = 0

    def backward(self, tokens_BT: Tensor, targets_BT: Tensor) -> None:
        """See `Contestant.backward`."""
        loss_sum(self.model(tokens_BT), targets_BT).backward()
        self.weight = targets_BT.numel()

    def update(self) -> float:
        """See `Contestant.update`."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.weight)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return 0.0

    def close(self) -> None:
        """Nothing was started."""


class Synchronised:
    """A strategy, used as its documentation says."""

    def __init__(
        self, name: str, model: nn.Module, world: World, hosts: RankPlacement | None, options: Any
    ) -> None:
        self.counted = CountedCommunicator(communicator(world))
        self.index = world.rank
        self.sync = replicate(
            model, world, strategy=name, comm=self.counted, hosts=hosts, **options
        )
        # After `replicate`: fsdp replaces the parameters.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @property
    def surplus(self) -> int:
        """See `Contestant.surplus`."""
        return self.counted.surplus

    def backward(self, tokens_BT: Tensor, targets_BT: Tensor) -> None:
        """See `Contestant.backward`."""
        with self.sync.micro_step(last=True, index=self.index):
            loss = loss_sum(self.sync.forward(tokens_BT), targets_BT)
            self.sync.backward(loss, weight=targets_BT.numel(), reduction="sum")

    def update(self) -> float:
        """See `Contestant.update`."""
        result = self.sync.step(self.optimizer)
        self.sync.replica.wait()  # ranks meet before the next step: nothing is left for it
        return result.exposed.seconds()

    def close(self) -> None:
        """See `Contestant.close`."""
        self.sync.close()


def enter(name: str, settings: Settings, world: World, hosts: RankPlacement | None) -> Contestant:
    """Make a contestant; all ranks call it."""
    model = GPT(settings.model)
    if name == ALONE:
        return Alone(model)
    hosts = hosts if name == "hierarchical" else None
    return Synchronised(name, model, world, hosts, settings.options(name))
