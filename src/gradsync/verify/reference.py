"""One rank in plain PyTorch: the run that every strategy is compared with.

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
from torch.utils.data import default_collate

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.checkpoint.weights import clean_names
from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.data.leaf import Leaf
from gradsync.runtime.seeds import seed_everything, seed_leaf, stream_seed
from gradsync.verify.problem import freeze_batch_norm, kept_randomness
from gradsync.verify.record import (
    Layout,
    LeafTrace,
    Observer,
    Tensors,
    Trace,
    sample_digests,
    trace_leaf,
)
from gradsync.verify.result import Cause, Finding, Kind
from gradsync.verify.run import Saved, Task, make_loader, make_optimizer


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
        task: problem and settings.
        world_size: of the run it is compared with; the number of leaves may depend on it.
        saved: the checkpoint that the run begins with; None: initial weights.
    """

    def __init__(self, task: Task, world_size: int, saved: Saved | None = None) -> None:
        self.task = task
        self._world_size = world_size
        self.saved = saved
        self.settings = task.settings_for(world_size)
        self._problem = task.build()
        self._model = self._problem.model
        if self.settings.batch_norm == "freeze":
            freeze_batch_norm(self._model)
        self._parameters = _by_clean_name(dict(self._model.named_parameters()))
        self._buffers = _by_clean_name(dict(self._model.named_buffers()))
        self.leaves = self._read_leaves()
        """All leaves of each step, by its number."""
        self.traces = {
            number: [self._trace_of(leaf) for leaf in leaves]
            for number, leaves in self.leaves.items()
        }
        """The records of these leaves that a right run has."""
        self._cache: dict[int, tuple[Tensors, list[LeafResult]]] = {}
        self.owner_of: dict[str, int] = {}
        """Digest of a sample's contents -> its place in the data set (the first of equal ones)."""
        dataset = self._problem.dataset
        for index in reversed(range(len(dataset))):
            self.owner_of[sample_digests(default_collate([dataset[index]]), 1)[0]] = index

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

    def leaf_results(self, step: int, weights: Tensors, buffers: Tensors) -> list[LeafResult]:
        """Loss and gradient of every leaf of `step` at `weights`, each computed alone."""
        cached = self._cache.get(step)
        if cached is not None and all(torch.equal(cached[0][n], weights[n]) for n in weights):
            return cached[1]
        self._load(weights, {})
        results = [self.leaf_result(leaf, buffers) for leaf in self.leaves[step]]
        self._cache[step] = (weights, results)
        return results

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

    def leaf_twice(self, number: int, *, all_generators: bool) -> tuple[LeafResult, LeafResult]:
        """Two results of the leaf of a step that has most targets, with the same buffers."""
        leaf = max(self.leaves[number], key=lambda leaf: leaf.num_targets)
        buffers = {name: tensor.clone() for name, tensor in self._buffers.items()}
        first = self.leaf_result(leaf, buffers, all_generators=all_generators)
        return first, self.leaf_result(leaf, buffers, all_generators=all_generators)

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
        packed, _ = pack_optimizer(optimizer, named)
        return self.start(), {name: tensor.clone() for name, tensor in packed.items()}

    def loss(self, weights: Tensors, buffers: Tensors) -> float:
        """Mean loss over the data set in evaluation mode."""
        self._load(weights, buffers)
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        leaves = [leaf for step in self.leaves.values() for leaf in step]
        with torch.no_grad():
            total = sum(float(self._loss_sum(leaf)) for leaf in leaves)
        for module, mode in modes.items():
            module.training = mode
        return total / sum(leaf.num_targets for leaf in leaves)

    def train(self) -> Trace:
        """The whole run on one rank, or what is left of it after the checkpoint; on a fresh twin,
        whose weights and buffers are those of the start."""
        return Reference(self.task, self._world_size, self.saved)._train()

    def _train(self) -> Trace:
        optimizer, saved = make_optimizer(self._model, self.settings), self.saved
        if saved is not None:
            self._load(saved.weights, saved.buffers)
            unpack_optimizer(optimizer, self._model.named_parameters(), *saved.optimizer)
        observer = Observer(self._model, Layout(self._model), optimizer)
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

    def _read_leaves(self) -> dict[int, list[Leaf]]:
        source = make_loader(self._problem, self.settings, 0, 1)
        if self.saved is not None:
            source.load_state_dict(self.saved.data)
        done = source.state_dict()["steps"]
        return {step.number: list(step) for step in islice(source, self.settings.num_steps - done)}

    def _loss_sum(self, leaf: Leaf) -> Tensor:
        with self.task.autocast():
            return self._problem.loss_sum(self._model(leaf.inputs), leaf.targets)

    def _trace_of(self, leaf: Leaf) -> LeafTrace:
        seed_leaf(self.settings.seed, leaf.step, leaf.index)
        return trace_leaf(leaf)

    @torch.no_grad()
    def _load(self, weights: Tensors, buffers: Tensors) -> None:
        for name, tensor in weights.items():
            self._parameters[name].copy_(tensor)
        for name, tensor in buffers.items():
            self._buffers[name].copy_(tensor)


def _by_clean_name(tensors: dict[str, Any]) -> dict[str, Any]:
    return {clean: tensors[name] for name, clean in clean_names(tensors).items()}


_SAME = 1e-6
"""Relative difference of a repetition on one rank: the same program on the same machine."""
_ALIKE = 1e-3
"""Between ranks, whose machines may round otherwise."""
_AGAIN = "the same leaf gives something else when it is run again"
_WHY = {
    Cause.RANDOM: f"{_AGAIN}, unless numpy's or Python's random generator is seeded before it",
    Cause.UNKNOWN: f"{_AGAIN}, with all generators seeded: something is kept between forwards",
}


def check_forward(
    task: Task, comm: Communicator, number: int, saved: Saved | None = None
) -> tuple[Cause, Finding] | None:
    """Run a leaf of step `number` twice on every rank: results that differ, on one rank or between
    ranks, no strategy can help; all ranks call it.

    Returns:
        the same on all ranks: None when the results agree.
    """
    with kept_randomness():
        # Each time a fresh model, which keeps whatever it keeps from forward to forward.
        twice = Reference(task, comm.world_size, saved).leaf_twice(number, all_generators=False)
        repeats = seeded = _same(*twice)
        if not repeats:
            fresh = Reference(task, comm.world_size, saved)
            seeded = _same(*fresh.leaf_twice(number, all_generators=True))
    norms = [float(gradient.double().norm()) for gradient in twice[0].gradient.values()]
    numbers = [twice[0].loss_sum, *norms]
    everyone = all_gather_json(comm, {"repeats": repeats, "seeded": seeded, "numbers": numbers})
    ranks = [rank for rank, each in enumerate(everyone) if not each["repeats"]]
    cause = Cause.RANDOM if ranks and all(each["seeded"] for each in everyone) else Cause.UNKNOWN
    detail = _WHY[cause]
    if not ranks:
        first = everyone[0]["numbers"]
        ranks = [rank for rank, each in enumerate(everyone) if not _alike(first, each["numbers"])]
        detail = "the same leaf gives something else on another rank: it depends on the rank"
    if not ranks:
        return None
    where = () if len(ranks) == comm.world_size else tuple(ranks)
    return cause, Finding(kind=Kind.FORWARD, step=number, ranks=where, detail=detail)


def _same(first: LeafResult, second: LeafResult) -> bool:
    """Whether two results of one leaf agree up to `_SAME`."""
    if first.gradient.keys() != second.gradient.keys():
        return False
    pairs = [(g.double(), second.gradient[name].double()) for name, g in first.gradient.items()]
    size = math.hypot(*(float(g.norm()) for g, _ in pairs))
    apart = math.hypot(*(float((g - other).norm()) for g, other in pairs))
    same_loss = math.isclose(first.loss_sum, second.loss_sum, rel_tol=_SAME)
    return same_loss and apart <= _SAME * size


def _alike(a: list[float], b: list[float]) -> bool:
    """Whether loss and norms of the same leaf on two ranks agree up to `_ALIKE`."""
    if len(a) != len(b) or not math.isclose(a[0], b[0], rel_tol=_ALIKE):
        return False
    small = _ALIKE * math.hypot(*a[1:])
    return all(math.isclose(x, y, abs_tol=small) for x, y in zip(a[1:], b[1:], strict=True))
