"""Training problems for the engine, ways to run them, and one hash of what comes out.

The hash is over weights, optimizer state, losses and norms, so that `invariant` can be held to all
of them. Data and masks are keyed by step and leaf; weights start differently on every rank.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import RankPlacement, SingleCommunicator
from gradsync.data.batch_plan import share
from gradsync.runtime.seeds import seed_micro_batch
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.sync_cases import SmallNet

NUM_STEPS = 3
global_random_state = threading.Lock()
"""Ranks may be threads of one process, which has one default generator."""

LossOfLeaf = Callable[[nn.Module, int, int], tuple[Tensor, int]]
"""(model, step, leaf) -> (loss summed over the leaf's targets, their number)."""


def inputs_of(step: int, leaf: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Inputs [2 + leaf % 3, *shape] and as many targets."""
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    shape = (2 + leaf % 3, *shape)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class MixedTypes(nn.Module):
    """Three dtypes in one model, on purpose not one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        )

    def forward(self, x_BC: Tensor) -> Tensor:
        for layer in self.layers:
            x_BC = torch.tanh(layer(x_BC.to(layer.weight.dtype)))
        return x_BC.float()


class Signs(nn.Module):
    """Its gradient is -0.0 everywhere, except that leaf 1 does not use it.

    The parameter is -0.0 too, or weight decay would add 0.0 to the gradient and hide its sign.
    """

    def __init__(self) -> None:
        super().__init__()
        self.minus_zero = nn.Parameter(torch.full((5,), -0.0))
        self.other = nn.Parameter(torch.ones(5))


def _squares(use_branch: Callable[[int, int], bool], padding: tuple[int, ...] = ()) -> LossOfLeaf:
    def loss(model: nn.Module, step: int, leaf: int) -> tuple[Tensor, int]:
        x, y = inputs_of(step, leaf, 6)
        errors = (model(x, use_branch(step, leaf)) - y).square().sum()
        return (errors * 0.0, 0) if leaf in padding else (errors, len(x))

    return loss


def _plain(*shape: int, autocast: bool = False) -> LossOfLeaf:
    def loss(model: nn.Module, step: int, leaf: int) -> tuple[Tensor, int]:
        x, y = inputs_of(step, leaf, *shape)
        casting = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with casting, global_random_state:
            seed_micro_batch(3, step, leaf)
            output = model(x)
        targets = y.flatten(1)[:, : output[0].numel()]
        return (output.float() - targets).square().sum(), len(x)

    return loss


def _signs(model: nn.Module, step: int, leaf: int) -> tuple[Tensor, int]:
    loss = (model.other * (1 + leaf)).sum()
    if leaf != 1:
        loss = loss + (model.minus_zero * -0.0).sum()
    return loss, 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss, leaves and optimizers."""

    model: Callable[[], nn.Module]
    loss: LossOfLeaf
    num_leaves: int = 8
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    and_adamw: bool = False
    """`optimizer` holds the matrices only, AdamW the rest."""
    clip_norm: float | None = 0.5

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        rest = [p for p in parameters if p.dim() != 2 and self.and_adamw]
        first = [p for p in parameters if p.dim() == 2 or not self.and_adamw]
        makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
            "muon": lambda p: torch.optim.Muon(p, lr=0.05),
        }
        return [makers[self.optimizer](first), *([makers["adamw"](rest)] if rest else [])]


def _net() -> nn.Module:
    return SmallNet(branch=True)


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.LayerNorm([4, 4, 4]), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 6))


def _some(step: int, leaf: int) -> bool:
    return leaf in (0, 6) and step != 1


PROBLEMS = {
    "branches": Problem(model=_net, loss=_squares(_some)),
    "branches, momentum": Problem(model=_net, loss=_squares(_some), optimizer="sgd"),
    "a branch nobody uses": Problem(model=_net, loss=_squares(lambda *_: False), clip_norm=None),
    "padding": Problem(model=_net, loss=_squares(lambda *_: True, (1, 4, 5)), num_leaves=7),
    "5 leaves": Problem(model=_net, loss=_squares(_some), num_leaves=5),
    "11 leaves": Problem(model=_net, loss=_squares(_some), num_leaves=11),
    "mixed dtypes": Problem(model=MixedTypes, loss=_plain(6), num_leaves=5),
    "bf16 weights": Problem(
        model=lambda: nn.Linear(6, 6, dtype=torch.bfloat16),
        loss=lambda m, s, i: ((m(inputs_of(s, i, 6)[0].bfloat16())).float().square().sum(), 1),
    ),
    "autocast and dropout": Problem(model=_dropout, loss=_plain(6, autocast=True)),
    "convolution": Problem(model=_conv, loss=_plain(1, 6, 6), num_leaves=6, optimizer="sgd"),
    "sgd and adamw": Problem(model=_net, loss=_squares(_some), optimizer="sgd", and_adamw=True),
    "muon and adamw": Problem(model=_net, loss=_squares(_some), optimizer="muon", and_adamw=True),
    "minus zero": Problem(model=Signs, loss=_signs, num_leaves=3, optimizer="sgd", clip_norm=None),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How it is trained: nothing here may change a bit under `invariant`."""

    told: Literal["leaf", "micro_step", "last", "nothing", "differently"] = "leaf"
    """How the handle learns what it may know of a leaf."""
    sync: str = "invariant"
    ranks_a_host: int | None = None
    """Pretend hosts of that size: sums follow them."""
    options: dict[str, Any] = field(default_factory=dict)


class MicroBatch(NamedTuple):
    """The fields of a loader's leaf that `backward` reads."""

    index: int
    is_last: bool
    num_targets: int


def train(problem: Problem, way: Way, comm: Communicator) -> str:
    """Train on this rank's share of each step; returns the hash."""
    options = dict(way.options)
    if way.ranks_a_host is not None:
        options |= {"hosts": pretend_hosts(comm, way.ranks_a_host)}
    with global_random_state:
        torch.manual_seed(1000 + comm.rank)
        model = problem.model()
    sync = replicate(model, strategy=way.sync, comm=comm, **options)
    optimizers = problem.make_optimizers(model)
    readings = []
    for step in range(NUM_STEPS):
        mine = share(problem.num_leaves, comm.rank, comm.world_size)
        for index in mine:
            _backward(problem, way, sync, step, index, last=index == mine[-1])
        result = sync.step(optimizers, clip_norm=problem.clip_norm)
        readings.append(float(result.mean_loss))
        if result.grad_norm is not None:
            readings.append(float(result.grad_norm))
    sync.close()
    return digest(model, optimizers, readings)


def _backward(
    problem: Problem, way: Way, sync: GradientSync, step: int, index: int, *, last: bool
) -> None:
    told = way.told
    if told == "differently":
        told = ("leaf", "last")[sync.comm.rank % 2]
    enclosing = {
        "micro_step": lambda: sync.micro_step(last=last, index=index),
        "last": lambda: sync.micro_step(last=last),
    }.get(told, nullcontext)
    with enclosing():
        loss, weight = problem.loss(sync.model, step, index)
        if told == "leaf":
            sync.backward(loss, MicroBatch(index, last, weight), reduction="sum")
        else:
            sync.backward(loss, weight=weight, reduction="sum")


def pretend_hosts(comm: Communicator, ranks_a_host: int) -> RankPlacement:
    """Hosts of ranks that really share one process."""
    return RankPlacement(tuple(rank // ranks_a_host for rank in range(comm.world_size)))


def digest(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], readings: list[float]
) -> str:
    """SHA-256 over parameters, buffers, the optimizers' state and `readings`."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(raw(tensor))
    for parameter in model.parameters():
        for name, value in sorted(
            item for each in optimizers for item in each.state.get(parameter, {}).items()
        ):
            sha.update(name.encode())
            sha.update(raw(torch.as_tensor(value)))
    sha.update(struct.pack(f"{len(readings)}d", *readings))
    return sha.hexdigest()


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@cache
def one_rank(name: str, sync: str = "invariant") -> str:
    """The hash of one rank for a problem, in the plainest way."""
    return train(PROBLEMS[name], Way(sync=sync), SingleCommunicator())


def bits(value: Any) -> Any:
    """Comparable by ==, bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), raw(value)
    if isinstance(value, dict):
        return {name: bits(entry) for name, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


def optimizers(model: nn.Module, number: int) -> Any:
    """An AdamW over all weights, or (2) a list: AdamW over the first one, SGD over the rest."""
    own = list(model.parameters())
    if number == 1:
        return torch.optim.AdamW(own, lr=0.1)
    return [torch.optim.AdamW(own[:1], lr=0.1), torch.optim.SGD(own[1:], lr=0.1, momentum=0.9)]
