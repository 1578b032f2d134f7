"""One rank in plain PyTorch: the run that every strategy is compared with.

Nothing here uses `sync`: each micro-batch's gradient is computed alone, the mean is a sum and a
division, clipping and the optimizer are torch's. So a mistake that all strategies share, even on
one rank, still shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.checkpoint.weights import pack_weights
from gradsync.commands.verify.record import (
    MicroBatchTrace,
    Observer,
    State,
    Tensors,
    Trace,
    trace_micro_batch,
)
from gradsync.commands.verify.run import Task, make_loader, make_optimizer
from gradsync.commands.verify.settings import CLIP_NORM, SEED
from gradsync.data.micro_batch import MicroBatch
from gradsync.runtime.seeds import seed_micro_batch


@dataclass(slots=True)
class MicroBatchResult:
    """One micro-batch at given weights."""

    index: int
    weight: float
    loss_sum: float
    gradient: Tensors  # of the summed loss; absent if it does not use a parameter
    buffers: Tensors  # afterwards, starting from the step's initial ones


class Reference:
    """The one-rank twin of a run on `world_size` ranks, which may determine the number of
    micro-batches. It does not communicate."""

    def __init__(self, task: Task, world_size: int) -> None:
        self.task = task
        self.settings = task.settings_for(world_size)
        self._problem = task.build()
        self._model = self._problem.model
        self._parameters = pack_weights(dict(self._model.named_parameters()))
        self._buffers = pack_weights(dict(self._model.named_buffers()))
        source = make_loader(self._problem, self.settings, 0, 1)
        if task.saved is not None:
            source.load_state_dict(task.saved.data)
        left = self.settings.num_steps - source.state_dict()["steps"]
        # All micro-batches of each step, by its number, and a correct run's records of them.
        self.batches = {step.number: list(step) for step in islice(source, left)}
        self.traces = {n: [*map(self._trace_of, batch)] for n, batch in self.batches.items()}
        self._cache: dict[int, tuple[Tensors, list[MicroBatchResult]]] = {}

    @property
    def optimizer_group(self) -> dict[str, Any]:
        """The optimizer's settings, the same for all parameters."""
        return make_optimizer(self._model).param_groups[0]

    def weights(self) -> Tensors:
        """A copy of the model's current weights: at first, the initial ones."""
        return {name: tensor.detach().clone() for name, tensor in self._parameters.items()}

    def results(self, step: int, weights: Tensors, buffers: Tensors) -> list[MicroBatchResult]:
        """Loss and gradient of every micro-batch of `step` at `weights`, each computed alone."""
        cached = self._cache.get(step)
        if cached is not None and all(torch.equal(cached[0][n], weights[n]) for n in weights):
            return cached[1]
        self._load(weights, {})
        results = [self._result(each, buffers) for each in self.batches[step]]
        self._cache[step] = (weights, results)
        return results

    def _result(self, micro_batch: MicroBatch, buffers: Tensors) -> MicroBatchResult:
        self._load({}, buffers)
        seed_micro_batch(SEED, micro_batch.step, micro_batch.index)
        loss = self._loss_sum(micro_batch)
        loss.backward()
        gradient = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        for name in gradient:
            self._parameters[name].grad = None
        changed = {name: self._buffers[name].clone() for name in buffers}
        loss_sum = float(loss.detach().double())
        return MicroBatchResult(
            micro_batch.index, micro_batch.num_targets, loss_sum, gradient, changed
        )

    def update(self, before: State, gradient: dict[str, Tensor | None]) -> tuple[Tensors, Tensors]:
        """Weights and optimizer state (`slot/parameter`) after one step of the optimizer."""
        self._load(before.weights, {})
        optimizer = make_optimizer(self._model)
        named = list(self._model.named_parameters())
        if before.description["params"]:
            # The run's state with our settings: a changed learning rate in the run must show.
            _, own = pack_optimizer(optimizer, named)
            description = {**before.description, "groups": own["groups"]}
            unpack_optimizer(optimizer, named, before.optimizer, description)
        for name, parameter in self._parameters.items():
            found = gradient.get(name)
            parameter.grad = None if found is None else found.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        packed, _ = pack_optimizer(optimizer, named)
        return self.weights(), {name: tensor.clone() for name, tensor in packed.items()}

    def loss(self, state: State) -> float:
        """Mean loss over the data set in evaluation mode, in which the model is left."""
        self._load(state.weights, state.buffers)
        self._model.eval()
        every = [each for batch in self.batches.values() for each in batch]
        with torch.no_grad():
            total = sum(float(self._loss_sum(each)) for each in every)
        return total / sum(each.num_targets for each in every)

    def train(self) -> Trace:
        """The whole run on one rank, or the rest of it after the checkpoint. Only on a fresh twin
        are weights and buffers the initial ones."""
        optimizer, saved = make_optimizer(self._model), self.task.saved
        if saved is not None:
            self._load(saved.weights, saved.buffers)
            named = self._model.named_parameters()
            unpack_optimizer(optimizer, named, saved.optimizer, saved.description)
        observer = Observer(self._model, Trace.of(self._model), optimizer)
        try:
            for number, batch in self.batches.items():
                observer.begin(number)
                losses = []
                for each in batch:
                    seed_micro_batch(SEED, each.step, each.index)
                    observer.micro_batch(each)
                    loss = self._loss_sum(each)
                    loss.backward()
                    losses.append(float(loss.detach().double()))
                weight, norm = float(sum(each.num_targets for each in batch)), None
                if weight:  # else no target counts in this step, and nothing moves
                    parameters = [p for p in self._parameters.values() if p.grad is not None]
                    for parameter in parameters:
                        assert parameter.grad is not None
                        parameter.grad.mul_(1.0 / weight)
                    norm = float(torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM))
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                observer.end(math.fsum(losses) / weight if weight else math.nan, weight, norm)
        finally:
            observer.close()
        return observer.trace

    def _loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        with self.task.autocast():
            output = self._model(micro_batch.inputs)
            return self._problem.loss_sum(output, micro_batch.targets)

    def _trace_of(self, micro_batch: MicroBatch) -> MicroBatchTrace:
        seed_micro_batch(SEED, micro_batch.step, micro_batch.index)
        return trace_micro_batch(micro_batch)

    @torch.no_grad()
    def _load(self, weights: Tensors, buffers: Tensors) -> None:
        for name, tensor in weights.items():
            self._parameters[name].copy_(tensor)
        for name, tensor in buffers.items():
            self._buffers[name].copy_(tensor)
