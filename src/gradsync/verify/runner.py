"""Trains one problem with the library's own loop and records it; called by every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import Groups
from gradsync.comm.groups import groups as make_groups
from gradsync.data.loader import Loader, loader
from gradsync.runtime.seeds import seed_leaf
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import find_strategy
from gradsync.sync.replicate import replicate
from gradsync.verify.observer import Layout, Observer
from gradsync.verify.plan import PLAIN, Settings, Variant, settings_for
from gradsync.verify.problem import LossSum, Problem, build_problem
from gradsync.verify.promise import promise_of
from gradsync.verify.trace import Trace
from gradsync.world import World

LEARNING_RATE = 1e-2


@dataclass(slots=True)
class Parts:
    """The parts of a training loop, handed to `prepare` before it starts."""

    strategy: str
    comm: Communicator
    model: nn.Module
    loss_sum: LossSum
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    loader: Any
    """Iterating gives steps; iterating a step gives leaves."""
    seed_leaf: Callable[[int, int, int], None] = seed_leaf
    """`seed_leaf(seed, step, leaf)` before each forward."""


Prepare = Callable[[Parts], Parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and how."""

    strategy: str
    model: str
    dtype: str
    settings: Settings
    variant: Variant = PLAIN

    @property
    def used_dtype(self) -> str:
        """The variant's dtype, or the cell's."""
        return self.variant.dtype or self.dtype

    def build(self) -> Problem:
        """A fresh problem, in the dtype of the weights."""
        problem = build_problem(self.model, self.settings, self.variant)
        return in_double(problem) if self.used_dtype == "fp64" else problem

    def settings_for(self, world_size: int) -> Settings:
        """Settings with the number of leaves that the variant and the strategy need."""
        equal_leaves = promise_of(self.strategy).equal_leaves or self.settings.batch_norm == "sync"
        return settings_for(self.settings, self.variant, world_size, equal_leaves=equal_leaves)


def train_traced(
    task: Task,
    comm: Communicator,
    *,
    groups: Groups | None = None,
    prepare: Prepare | None = None,
    start: Callable[[Parts], None] | None = None,
) -> Trace:
    """Train on this rank's share; every rank of `comm` calls it.

    Ranks above 0 start from other weights, so that a start that is not shared shows.

    Args:
        task: what to train.
        comm: the ranks.
        groups: inside and between hosts, for `hierarchical`; None on one rank makes them.
        prepare: may replace any part of the loop before it starts; a seam for tests.
        start: called before the first step, to load a checkpoint.
    """
    parts, observer = _set_up(task, comm, groups, prepare, start)
    settings = task.settings_for(comm.world_size)
    try:
        for step in islice(parts.loader, settings.num_steps - parts.loader.state_dict()["steps"]):
            observer.begin(step.number)
            for leaf in step:
                with parts.sync.micro_step(last=leaf.is_last, index=leaf.index):
                    parts.seed_leaf(settings.seed, leaf.step, leaf.index)
                    observer.leaf(leaf)
                    with autocast(task.used_dtype):
                        output = parts.sync.forward(leaf.inputs)
                        loss = parts.loss_sum(output, leaf.targets)
                    parts.sync.backward(loss, leaf=leaf)
            result = parts.sync.step(parts.optimizer, clip_norm=settings.clip_norm)
            norm = None if result.grad_norm is None else float(result.grad_norm)
            observer.end(float(result.mean_loss), result.weight, norm)
            observer.trace.steps[-1].data = dict(parts.loader.state_dict())
    finally:
        observer.close()
        parts.sync.close()
    return observer.trace


def _set_up(
    task: Task,
    comm: Communicator,
    groups: Groups | None,
    prepare: Prepare | None,
    start: Callable[[Parts], None] | None,
) -> tuple[Parts, Observer]:
    settings, problem = task.settings_for(comm.world_size), task.build()
    layout = Layout(problem.model)
    if groups is None and comm.world_size == 1:
        groups = make_groups(World())
    _disturb(problem.model, comm.rank)
    options = strategy_options(task.strategy, uses_all=problem.uses_all)
    sync = replicate(
        problem.model,
        sync=task.strategy,
        comm=comm,
        groups=groups,
        batch_norm=settings.batch_norm if problem.has_batch_norm else None,
        **options,
    )
    parts = Parts(
        strategy=task.strategy,
        comm=comm,
        model=problem.model,
        loss_sum=problem.loss_sum,
        optimizer=make_optimizer(problem.model, settings),
        sync=sync,
        loader=make_loader(problem, settings, comm.rank, comm.world_size),
    )
    if start is not None:
        start(parts)
    if prepare is not None:
        parts = prepare(parts)
    whole = not promise_of(task.strategy).local
    return parts, Observer(parts.model, layout, parts.optimizer, parts.sync.reducer, whole=whole)


def make_loader(problem: Problem, settings: Settings, rank: int, world_size: int) -> Loader:
    """The public loader of `problem` for one rank."""
    return loader(
        problem.dataset,
        World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size),
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.leaf_size,
        seed=settings.seed,
        num_epochs=settings.num_epochs,
    )


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum, over what is trained."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.01)


@contextmanager
def autocast(dtype: str) -> Generator[None]:
    """bf16 mixed precision, or nothing."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
        yield


def in_double(problem: Problem) -> Problem:
    """The problem in fp64: model and floating inputs, wherever in them they are."""
    model = problem.model.double()

    def widen(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return tuple(map(_widened, inputs)), _widened(named)

    model.register_forward_pre_hook(widen, with_kwargs=True)
    return replace(problem, model=model)


def _widened(value: Any) -> Any:
    """`value` with every floating tensor in it in fp64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _widened(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_widened, value))
    if isinstance(value, tuple | list):
        return type(value)(map(_widened, value))
    return value


@torch.no_grad()
def _disturb(model: nn.Module, rank: int) -> None:
    """Other weights and buffers on each rank above 0: rank 0's must win."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.add_(rank)


def strategy_options(strategy: str, *, uses_all: bool) -> dict[str, Any]:
    """What a strategy has to be told, so that its mechanism shows in a short run of a small model:
    several buckets, compression and meetings from the start."""
    entry = find_strategy(strategy)
    options: dict[str, Any] = {
        "bucket_mb": 0.01,
        "first_bucket_mb": 0.002,
        "find_unused_parameters": not uses_all,
        "start_powerSGD_iter": 2,
        "inner_steps": 2,
    }
    return {name: value for name, value in options.items() if name in entry.options}
