"""The record of one rank's run, step by step: weights, gradients, states, and digests of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.tensor_file import tensor_bytes
from gradsync.checkpoint.weights import clean_names
from gradsync.comm.base import Work
from gradsync.data.leaf import Leaf
from gradsync.errors import ConfigError
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.sharded_state import whole

Tensors = dict[str, Tensor]


@dataclass(slots=True)
class LeafTrace:
    """One micro-batch as it was trained on."""

    index: int
    """Place in the step, counted over all ranks."""
    weight: float
    """Targets that count."""
    samples: list[str]
    """Digest of each sample's contents."""
    random: str
    """Digest of the state that dropout on the CPU draws from, before the forward."""


@dataclass(slots=True)
class StepTrace:
    """One optimizer step."""

    number: int
    leaves: list[LeafTrace] = field(default_factory=list)
    loss: float = float("nan")
    """Mean over the global batch."""
    weight: float = 0.0
    """Targets in the global batch, as the run counted them."""
    norm: float | None = None
    """Norm of the mean gradient before clipping, as the run saw it."""
    before: Tensors = field(default_factory=dict)
    """Weights before the first forward."""
    at_step: Tensors = field(default_factory=dict)
    """Weights when the optimizer was called."""
    gradient: dict[str, Tensor | None] = field(default_factory=dict)
    """Mean gradients as the optimizer saw them, clipped."""
    updated: Tensors = field(default_factory=dict)
    """Weights as the optimizer left them."""
    after: Tensors = field(default_factory=dict)
    """Weights at the end of the step (others than `updated` where weights are averaged)."""
    buffers: Tensors = field(default_factory=dict)
    """Buffers at the end of the step."""
    state: Tensors = field(default_factory=dict)
    """Optimizer state at the end of the step, `slot/parameter`."""
    description: dict[str, Any] = field(default_factory=dict)
    """The rest of that state, as `pack_optimizer` gives it."""
    extra: Tensors = field(default_factory=dict)
    """The strategy's own state, such as an outer momentum."""
    data: dict[str, Any] = field(default_factory=dict)
    """The loader's state at the end of the step."""


@dataclass(slots=True)
class Trace:
    """A whole run on one rank."""

    trainable: tuple[str, ...]
    """Names of trainable parameters, tied ones once."""
    persistent: tuple[str, ...] = ()
    """Names of the buffers that a checkpoint keeps."""
    steps: list[StepTrace] = field(default_factory=list)
    start_buffers: Tensors = field(default_factory=dict)
    """Buffers before the first step."""
    start_state: tuple[Tensors, dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    """Packed optimizer state before the first step: empty, or loaded from a checkpoint."""

    def state_before(self, place: int) -> tuple[Tensors, dict[str, Any]]:
        """Packed optimizer state before the step at `place` in `steps`."""
        if place == 0:
            return self.start_state
        return self.steps[place - 1].state, self.steps[place - 1].description

    def buffers_before(self, place: int) -> Tensors:
        """Buffers before the step at `place` in `steps`."""
        return self.start_buffers if place == 0 else self.steps[place - 1].buffers


_TENSOR_PARTS = ("before", "at_step", "gradient", "updated", "after", "buffers", "state")


def digest(tensor: Tensor | None) -> str:
    """Equal for equal bits; "" for no tensor."""
    if tensor is None:
        return ""
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=8).hexdigest()


def digests_of(step: StepTrace) -> dict[str, Any]:
    """A step for the other ranks: digests in place of tensors, as JSON types."""
    document: dict[str, Any] = {
        "number": step.number,
        "leaves": [asdict(leaf) for leaf in step.leaves],
        "loss": step.loss,
        "weight": step.weight,
        "norm": step.norm,
    }
    for part in _TENSOR_PARTS:
        tensors: Mapping[str, Tensor | None] = getattr(step, part)
        document[part] = {name: digest(tensor) for name, tensor in tensors.items()}
    return document


def trace_leaf(leaf: Leaf) -> LeafTrace:
    """The record of a leaf; random numbers are already seeded for it."""
    samples = sample_digests(leaf.batch, leaf.num_samples)
    return LeafTrace(leaf.index, leaf.num_targets, samples, digest(torch.get_rng_state()))


def sample_digests(batch: Any, num_samples: int) -> list[str]:
    """A digest for each sample of a collated batch, from its contents alone.

    Tensors whose first dimension counts samples are cut along it; everything else in the batch
    belongs to all of its samples.
    """
    parts = [hashlib.blake2b(digest_size=8) for _ in range(num_samples)]
    for tensor in _tensors_in(batch):
        by_sample = tensor.ndim > 0 and len(tensor) == num_samples
        for index, part in enumerate(parts):
            part.update(tensor_bytes(tensor[index] if by_sample else tensor))
    return [part.hexdigest() for part in parts]


def _tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for key in sorted(batch) for tensor in _tensors_in(batch[key])]
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in _tensors_in(part)]
    return []


class Layout:
    """Names of a model's tensors, read before a strategy touches it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(clean_names(name for name, _ in model.named_parameters()).values())
        self.trainable = tuple(clean_names(name for name, _ in trainable(model)).values())
        saved = set(clean_names(model.state_dict()).values())
        buffers = clean_names(name for name, _ in model.named_buffers()).values()
        self.persistent = tuple(name for name in buffers if name in saved)


class Observer:
    """Fills a `Trace`. Calls that may communicate are made by all ranks at the same places.

    With a reducer, its `update` is watched, else the optimizer's `step`: a strategy may step with
    optimizers of its own, over shards.

    Args:
        model: the one that is trained.
        layout: its names, from before `gs.replicate`.
        optimizer: updates the weights.
        reducer: of the strategy; None for a loop without gradsync.
        whole: ask the reducer for whole weights and states. False where each rank has weights of
            its own: asking would end a round (see `sync/periodic/rounds.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None = None,
        *,
        whole: bool = True,
    ) -> None:
        self._model, self._layout = model, layout
        self._optimizer = optimizer
        self._shards = None if reducer is None else reducer.shards
        self._whole = self._shards if whole else None
        self._watched: Any = optimizer if reducer is None else reducer.shards
        self._method = "step" if reducer is None else "update"
        self._original = getattr(self._watched, self._method)
        setattr(self._watched, self._method, self._update)
        if self._shards is not None:
            self._publish_original = self._shards.publish
            self._shards.publish = self._publish
        weights, buffers = self._weights()
        self.trace = Trace(layout.trainable, layout.persistent, start_buffers=buffers)
        self.trace.start_state = self._state()
        self._next_weights = weights

    @property
    def _step(self) -> StepTrace:
        return self.trace.steps[-1]

    def begin(self, number: int) -> None:
        """Note the weights before the first leaf of a step."""
        self.trace.steps.append(StepTrace(number, before=self._next_weights))

    def leaf(self, leaf: Leaf) -> None:
        """Note a leaf before its forward, random numbers seeded."""
        self._step.leaves.append(trace_leaf(leaf))

    def end(self, loss: float, weight: float, norm: float | None) -> None:
        """Note what the step reported and left behind, after the optimizer."""
        step = self._step
        step.loss, step.weight, step.norm = loss, weight, norm
        step.after, step.buffers = self._weights()
        step.state, step.description = self._state()
        if self._shards is not None:
            kept = self._shards.state_tensors()
            step.extra = {name: _copy(tensor) for name, tensor in kept.items()}
        self._next_weights = step.after

    def close(self) -> None:
        """Watch no longer."""
        delattr(self._watched, self._method)
        if self._shards is not None:
            delattr(self._shards, "publish")

    def _update(self, *arguments: Any) -> None:
        """Stand in for the optimizer's step: note gradients and weights around it."""
        self._step.gradient = self._gradients()
        self._step.at_step, _ = self._weights()
        self._original(*arguments)
        # Where ranks are equal, weights are whole once published; where they drift, that is a mean.
        if self._shards is None or not self._shards.equal_replicas:
            self._step.updated, _ = self._weights()

    def _publish(self) -> Work:
        """Stand in for the strategy's `publish`: note the weights after it."""
        work = self._publish_original()
        if self._shards is not None and self._shards.equal_replicas and self._step.at_step:
            work.wait()
            self._step.updated, _ = self._weights()
        return work

    def _gradients(self) -> dict[str, Tensor | None]:
        """Copies of the mean gradients of whole parameters; all ranks call it."""
        named = trainable(self._model)
        names = clean_names(name for name, _ in named).values()
        for name in names:
            # `check_target` finds it first, except where a forward needs a process group.
            if name not in self._layout.trainable:
                raise ConfigError(
                    f"a forward made parameter {name!r}, which no optimizer knows: make it in "
                    "__init__, or run a batch through the model in the factory"
                )
        if self._shards is not None:
            found = self._shards.whole_gradients()
        else:
            found = [None if p.grad is None else whole(p.grad) for _, p in named]
        return {
            name: None if gradient is None else _copy(gradient)
            for name, gradient in zip(names, found, strict=True)
        }

    def _weights(self) -> tuple[Tensors, Tensors]:
        """Copies of parameters (tied ones once) and buffers."""
        read = self._model.state_dict if self._whole is None else self._whole.full_weights
        state = read()
        state = {clean: state[name] for name, clean in clean_names(state).items()}
        buffers = dict(self._model.named_buffers())
        return (
            {name: _copy(state[name]) for name in self._layout.parameters},
            {clean: _copy(buffers[name]) for name, clean in clean_names(buffers).items()},
        )

    def _state(self) -> tuple[Tensors, dict[str, Any]]:
        """A copy of the optimizer's whole state by parameter name."""
        if self._whole is not None:
            self._whole.gather(self._optimizer)
        tensors, description = pack_optimizer(self._optimizer, self._model.named_parameters())
        copied = {name: _copy(tensor) for name, tensor in tensors.items()}
        if self._whole is not None:
            self._whole.scatter(self._optimizer)
        return copied, description


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
