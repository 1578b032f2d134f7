"""One rank, plain PyTorch: what every strategy is compared with.

Nothing here comes from `sync`: the gradient of each leaf is computed alone, the mean is a sum and
a division, clipping and the optimizer are torch's. So a mistake that all strategies share, at one
rank too, still shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.names import clean_names
from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.data.leaf import Leaf
from gradsync.runtime.seeds import seed_everything, seed_leaf, stream_seed
from gradsync.verify.observer import Layout, Observer
from gradsync.verify.problem import freeze_batch_norm
from gradsync.verify.runner import Task, autocast, make_loader, make_optimizer
from gradsync.verify.saved import Saved
from gradsync.verify.trace import LeafTrace, Tensors, Trace, random_digest, sample_digests


@dataclass(slots=True)
class LeafResult:
    """One leaf at given weights."""

    index: int
    weight: float
    loss_sum: float
    gradient: dict[str, Tensor]
    """Gradient of the summed loss, by name; absent where the leaf does not use a parameter."""
    buffers: Tensors
    """Buffers after the leaf, when it found those of the step's beginning."""


class Reference:
    """The one-rank twin of a task; made where it is needed, without communication.

    Args:
        task: what is trained.
        world_size: of the run it is compared with; the number of leaves may depend on it.
        saved: the checkpoint that the run begins with.
    """

    def __init__(self, task: Task, world_size: int, saved: Saved | None = None) -> None:
        self.task = task
        self._world_size, self._saved = world_size, saved
        self.settings = task.settings_for(world_size)
        self._problem = task.build()
        self._model = self._problem.model
        if self.settings.batch_norm == "freeze":
            freeze_batch_norm(self._model)
        self.layout = Layout(self._model)
        self._parameters = {
            clean: dict(self._model.named_parameters())[name]
            for name, clean in clean_names(n for n, _ in self._model.named_parameters()).items()
        }
        buffers = dict(self._model.named_buffers())
        self._buffers = {clean: buffers[name] for name, clean in clean_names(buffers).items()}
        self.leaves = self._read_leaves()
        """All leaves of each step, by its number."""
        self.traces = {
            number: [self._trace_of(leaf) for leaf in leaves]
            for number, leaves in self.leaves.items()
        }
        """What their traces must say."""
        self._cache: dict[int, tuple[Tensors, list[LeafResult]]] = {}
        self.owner_of = self._sample_names()
        """Digest of a sample's contents -> its place in the data set (the first of equal ones)."""

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model keeps statistics over batches."""
        return self._problem.has_batch_norm

    @property
    def optimizer_group(self) -> dict[str, Any]:
        """The optimizer's settings, alike for all parameters."""
        return make_optimizer(self._model, self.settings).param_groups[0]

    def start(self) -> Tensors:
        """Initial weights."""
        return {name: tensor.detach().clone() for name, tensor in self._parameters.items()}

    def buffers(self) -> Tensors:
        """Buffers as they are now."""
        return {name: tensor.clone() for name, tensor in self._buffers.items()}

    def leaf_results(self, step: int, weights: Tensors, buffers: Tensors) -> list[LeafResult]:
        """Loss and gradient of every leaf of `step` at `weights`, each computed alone."""
        cached = self._cache.get(step)
        if cached is not None and _same(cached[0], weights):
            return cached[1]
        self._load(weights, {})
        results = [self.leaf_result(leaf, buffers) for leaf in self.leaves[step]]
        self._cache[step] = (weights, results)
        return results

    def update(
        self,
        weights: Tensors,
        state: tuple[Tensors, dict[str, Any]],
        gradient: dict[str, Tensor | None],
    ) -> tuple[Tensors, Tensors]:
        """One optimizer step from given weights, state and gradient.

        Returns:
            weights and optimizer state (`slot/parameter`) afterwards.
        """
        self._load(weights, {})
        optimizer = make_optimizer(self._model, self.settings)
        named = list(self._model.named_parameters())
        tensors, description = state
        if description["params"]:
            # The run's state, but our own settings: a learning rate of its own must show.
            _, own = pack_optimizer(optimizer, named)
            unpack_optimizer(optimizer, named, tensors, {**description, "groups": own["groups"]})
        for name, parameter in self._parameters.items():
            found = gradient.get(name)
            parameter.grad = None if found is None else found.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        packed, _ = pack_optimizer(optimizer, self._model.named_parameters())
        return self.start(), {name: tensor.clone() for name, tensor in packed.items()}

    def train(self) -> Trace:
        """The whole run on one rank, or what is left of it after the checkpoint."""
        return Reference(self.task, self._world_size, self._saved)._train()

    def loss(self, weights: Tensors, buffers: Tensors) -> float:
        """Mean loss over the data set in evaluation mode."""
        self._load(weights, buffers)
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for leaf in (leaf for leaves in self.leaves.values() for leaf in leaves):
                total += float(self._loss_sum(leaf))
                weight += leaf.num_targets
        for module, mode in modes.items():
            module.training = mode
        return total / weight

    def _read_leaves(self) -> dict[int, list[Leaf]]:
        source = make_loader(self._problem, self.settings, 0, 1)
        if self._saved is not None:
            source.load_state_dict(self._saved.data)
        done = source.state_dict()["steps"]
        return {step.number: list(step) for step in islice(source, self.settings.num_steps - done)}

    def _train(self) -> Trace:
        optimizer, saved = make_optimizer(self._model, self.settings), self._saved
        if saved is not None:
            self._load(saved.weights, saved.buffers)
            unpack_optimizer(optimizer, self._model.named_parameters(), *saved.optimizer)
        observer = Observer(self._model, self.layout, optimizer)
        try:
            for number, leaves in self.leaves.items():
                observer.begin(number)
                losses = []
                for leaf in leaves:
                    seed_leaf(self.settings.seed, leaf.step, leaf.index)
                    observer.leaf(leaf)
                    loss = self._loss_sum(leaf)
                    loss.backward()
                    losses.append(float(loss.detach().double()))
                weight = float(sum(leaf.num_targets for leaf in leaves))
                norm = None
                if weight:  # else nothing counts in this step, and nothing moves
                    norm = self._mean_and_clip(weight)
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                observer.end(math.fsum(losses) / weight if weight else math.nan, weight, norm)
        finally:
            observer.close()
        return observer.trace

    def _mean_and_clip(self, weight: float) -> float | None:
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / weight)
        if self.settings.clip_norm is None:
            return None
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm))

    def leaf_result(
        self, leaf: Leaf, buffers: Tensors, *, all_generators: bool = False
    ) -> LeafResult:
        """Loss and gradient of one leaf at the weights that the model has now.

        Args:
            leaf: any.
            buffers: that it finds.
            all_generators: also seed numpy's and Python's, which a run does not.
        """
        self._load({}, buffers)
        if all_generators:
            seed_everything(stream_seed(self.settings.seed, "leaf", leaf.step, leaf.index))
        seed_leaf(self.settings.seed, leaf.step, leaf.index)
        loss = self._loss_sum(leaf)
        loss.backward()
        gradient = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradient[name] = parameter.grad
                parameter.grad = None
        changed = {name: self._buffers[name].clone() for name in buffers}
        loss_sum = float(loss.detach().double())
        return LeafResult(leaf.index, leaf.num_targets, loss_sum, gradient, changed)

    def _loss_sum(self, leaf: Leaf) -> Tensor:
        with autocast(self.task.used_dtype):
            return self._problem.loss_sum(self._model(leaf.inputs), leaf.targets)

    def _trace_of(self, leaf: Leaf) -> LeafTrace:
        seed_leaf(self.settings.seed, leaf.step, leaf.index)
        return LeafTrace(
            leaf.index,
            leaf.num_targets,
            sample_digests(leaf.batch, leaf.num_samples),
            random_digest(),
        )

    def _sample_names(self) -> dict[str, int]:
        dataset, names = self._problem.dataset, {}
        for index in reversed(range(len(dataset))):
            batch = torch.utils.data.default_collate([dataset[index]])
            names[sample_digests(batch, 1)[0]] = index
        return names

    @torch.no_grad()
    def _load(self, weights: Tensors, buffers: Tensors) -> None:
        for name, tensor in weights.items():
            self._parameters[name].copy_(tensor)
        for name, tensor in buffers.items():
            self._buffers[name].copy_(tensor)


def _same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
