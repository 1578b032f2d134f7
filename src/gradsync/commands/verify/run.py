"""Recorded runs of one problem with the library's loop, from the start or from a checkpoint.

Every rank calls `train_traced`; `save` and `read` pass a recorded run's checkpoint to another run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradsync.checkpoint.optimizer_state import unpack_optimizer
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.checkpoint.weights import match_weights
from gradsync.comm.base import Communicator
from gradsync.comm.groups import RankPlacement
from gradsync.comm.values import broadcast_json, broadcast_tensors
from gradsync.commands.train.config import with_options
from gradsync.commands.verify.problem import LossSum, Problem, build_problem
from gradsync.commands.verify.record import Observer, State, Trace
from gradsync.commands.verify.settings import (
    CLIP_NORM,
    SEED,
    VerifySettings,
    chosen_strategy,
    promise_of,
)
from gradsync.data.loader import Loader, loader
from gradsync.data.micro_batch import map_tensors
from gradsync.errors import CheckpointError
from gradsync.runtime.seeds import seed_micro_batch
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import find_strategy
from gradsync.sync.replicate import replicate
from gradsync.world import World

LEARNING_RATE = 1e-2
INNER_STEPS = 2  # steps per round of ranks that step alone and meet
_OPTIONS: dict[str, Any] = {
    "bucket_mb": 0.01,
    "first_bucket_mb": 0.002,
    "start_powerSGD_iter": 2,
    "inner_steps": INNER_STEPS,
}
"""Several buckets, compression and meetings from the start: a short run of a small model must
exercise the strategy."""


@dataclass(slots=True)
class Parts:
    """The parts of a training loop, passed to `prepare` before it starts."""

    comm: Communicator
    model: nn.Module
    loss_sum: LossSum
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    loader: Any  # iterating gives steps; iterating a step gives micro-batches
    seed_micro_batch: Callable[[int, int, int], None] = seed_micro_batch  # before each forward


Prepare = Callable[[Parts], Parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training run: its problem, its strategy and its settings."""

    strategy: str
    model: str
    dtype: str
    settings: VerifySettings
    saved: State | None = None  # the checkpoint from which it continues

    def build(self) -> Problem:
        """Build a new problem, in the dtype of the weights."""
        problem = build_problem(self.model, self.settings)
        if self.dtype != "fp64":
            return problem

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        model = problem.model.double()
        model.register_forward_pre_hook(
            lambda _, inputs, named: map_tensors((inputs, named), widen), with_kwargs=True
        )
        return replace(problem, model=model)

    def settings_for(self, world_size: int) -> VerifySettings:
        """Settings with the number of micro-batches that the strategy needs, and the same data set,
        so that one run can continue another's checkpoint."""
        settings = self.settings
        if not chosen_strategy(self.strategy)[0].equal_leaves:
            return settings
        each = -(-settings.num_micro_batches // world_size)
        return replace(
            settings,
            num_samples=settings.dataset_size,
            num_micro_batches=world_size * each,
            whole_steps=True,
        )

    def autocast(self) -> torch.autocast:
        """bf16 mixed precision, or nothing."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bf16")


def train_traced(task: Task, comm: Communicator, prepare: Prepare | None = None) -> Trace:
    """Train on this rank's share; every rank of `comm` calls it. `prepare` is a hook for tests."""
    settings, problem = task.settings_for(comm.world_size), task.build()
    trace = Trace.of(problem.model)
    # As if the first half of the ranks were on one host and the rest on another, so that
    # `hierarchical` has two levels.
    first = (comm.world_size + 1) // 2
    hosts = RankPlacement(tuple(int(rank >= first) for rank in range(comm.world_size)))
    disturb(problem.model, comm.rank)
    name, given = with_options(task.strategy)
    options: dict[str, Any] = {**_OPTIONS, "find_unused_parameters": not problem.uses_all, **given}
    known = find_strategy(name).options
    sync = replicate(
        problem.model,
        strategy=name,
        comm=comm,
        hosts=hosts,
        batch_norm="local",
        **{name: value for name, value in options.items() if name in known},
    )
    parts = Parts(
        comm=comm,
        model=problem.model,
        loss_sum=problem.loss_sum,
        optimizer=make_optimizer(problem.model),
        sync=sync,
        loader=make_loader(problem, settings, comm.rank, comm.world_size),
    )
    if task.saved is not None:
        _load(task.saved, task.strategy, parts)
    if prepare is not None:
        parts = prepare(parts)
    whole = not promise_of(task.strategy).local
    observer = Observer(parts.model, trace, parts.optimizer, parts.sync.reducer, whole=whole)
    try:
        for step in islice(parts.loader, settings.num_steps - parts.loader.state_dict()["steps"]):
            observer.begin(step.number)
            for micro_batch in step:
                index = micro_batch.index
                with parts.sync.micro_step(last=micro_batch.is_last, index=index):
                    parts.seed_micro_batch(SEED, micro_batch.step, index)
                    observer.micro_batch(micro_batch)
                    with task.autocast():
                        output = parts.sync.forward(micro_batch.inputs)
                        loss = parts.loss_sum(output, micro_batch.targets)
                    parts.sync.backward(loss, micro_batch, reduction="sum")
            result = parts.sync.step(parts.optimizer, clip_norm=CLIP_NORM)
            norm = None if result.grad_norm is None else float(result.grad_norm)
            observer.end(float(result.mean_loss), result.weight, norm)
            trace.steps[-1].after.data = dict(parts.loader.state_dict())
    finally:
        observer.close()
        parts.sync.close()
    return trace


def make_loader(problem: Problem, settings: VerifySettings, rank: int, world_size: int) -> Loader:
    """The public loader of `problem` for one rank."""
    return loader(
        problem.dataset,
        World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size),
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        seed=SEED,
        num_epochs=settings.num_epochs,
    )


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)


@torch.no_grad()
def disturb(model: nn.Module, rank: int) -> None:
    """Set different weights and buffers on each rank, to expose a start that is not shared."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.add_(rank)


# -- checkpoints ----------------------------------------------------------------------------------

_TENSORS = ("weights", "buffers", "optimizer", "extra")
_REST = ("description", "data", "strategy")


def save(directory: Path, strategy: str, trace: Trace, steps: int) -> None:
    """Write the state of `trace` after `steps` steps as an ordinary checkpoint."""
    after = trace.steps[steps - 1].after
    buffers = {name: after.buffers[name] for name in trace.persistent}
    state = replace(after, buffers=buffers, strategy=strategy)
    CheckpointStore(directory).save(
        Snapshot(
            step=steps,
            tensors={part: getattr(state, part) for part in _TENSORS},
            state={part: getattr(state, part) for part in _REST},
        )
    )


def read(directory: Path, comm: Communicator) -> State:
    """Read and check a checkpoint; rank 0 reads and distributes it, as in a training run."""
    rest, tensors = None, {}
    if comm.rank == 0:
        store = CheckpointStore(directory)
        info, problems = store.latest()
        if info is None:
            raise CheckpointError("; ".join([f"no checkpoint in {directory.name}", *problems]))
        found = store.load(info.path)
        rest, tensors = found.state, found.tensors
    rest = broadcast_json(comm, rest)
    parts: dict[str, Any] = {p: broadcast_tensors(comm, tensors.get(p)) for p in _TENSORS}
    return State(**parts, **{part: rest[part] for part in _REST})


def _load(saved: State, strategy: str, parts: Parts) -> None:
    """Load a checkpoint into a run that has not begun, with the calls that a resumed training run
    makes; all ranks call it."""
    parts.loader.load_state_dict(saved.data)
    weights = match_weights(
        parts.model.state_dict(keep_vars=True), {**saved.weights, **saved.buffers}
    )
    parts.sync.replica.load_full_weights(weights)
    named = list(parts.model.named_parameters())
    unpack_optimizer(parts.optimizer, named, saved.optimizer, saved.description)
    parts.sync.replica.scatter(parts.optimizer)
    if saved.extra and strategy == saved.strategy:
        parts.sync.replica.load_state_tensors(saved.extra)
