"""The record of one rank's run, step by step: weights, gradients, states, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.tensor_file import tensor_bytes
from gradsync.checkpoint.weights import clean_names, pack_weights
from gradsync.comm.base import Work
from gradsync.data.micro_batch import MicroBatch, map_tensors
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.shares import whole

Tensors = dict[str, Tensor]
MicroBatchTrace = dict[str, Any]  # see `trace_micro_batch`

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclass(kw_only=True, slots=True)
class State:
    """A training run between two steps; also the contents of its checkpoint."""

    weights: Tensors  # parameters, tied ones once
    buffers: Tensors
    optimizer: Tensors  # its state, as `slot/parameter`
    description: dict[str, Any]  # the rest of that state, as `pack_optimizer` gives it
    extra: Tensors = field(default_factory=dict)  # the strategy's state, such as an outer momentum
    data: dict[str, Any] = field(default_factory=dict)  # the loader's
    strategy: str = ""  # the strategy that saved it, in a checkpoint


@dataclass(slots=True)
class StepTrace:
    """One optimizer step."""

    number: int
    before: State
    after: State  # its weights differ from `updated` if ranks average them
    micro_batches: list[MicroBatchTrace] = field(default_factory=list)  # this rank's
    loss: float = float("nan")  # mean over the global batch, as reported; also weight and norm
    weight: float = 0.0  # targets in the global batch
    norm: float | None = None  # norm of the mean gradient before clipping
    gradient: dict[str, Tensor | None] = field(default_factory=dict)  # as the optimizer received it
    at_step: Tensors = field(default_factory=dict)  # weights when the optimizer was called
    updated: Tensors = field(default_factory=dict)  # as the optimizer, if called, left them

    def digests(self) -> dict[str, Any]:
        """The step for other ranks: digests instead of tensors, as JSON types."""
        parts: dict[str, Mapping[str, Tensor | None]] = {
            "before": self.before.weights,
            "at_step": self.at_step,
            "gradient": self.gradient,
            "after": self.after.weights,
            "buffers": self.after.buffers,
        }
        return {
            "norm": self.norm,
            "micro_batches": self.micro_batches,
            **{part: {n: digest(t) for n, t in each.items()} for part, each in parts.items()},
        }


@dataclass(slots=True)
class Trace:
    """A whole run on one rank. Make it before a strategy touches the model: it reads the names."""

    parameters: tuple[str, ...]  # names of all parameters, tied ones once
    trainable: tuple[str, ...]  # names of trained parameters
    persistent: tuple[str, ...] = ()  # names of the buffers that a checkpoint keeps
    steps: list[StepTrace] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Trace:
        """An empty record of `model`."""
        saved = set(clean_names(model.state_dict()).values())
        buffers = clean_names(name for name, _ in model.named_buffers()).values()
        return cls(
            tuple(clean_names(name for name, _ in model.named_parameters()).values()),
            tuple(clean_names(name for name, _ in trainable(model)).values()),
            tuple(name for name in buffers if name in saved),
        )


def digest(tensor: Tensor | None) -> str:
    """Equal for equal bits; "" for no tensor."""
    if tensor is None:
        return ""
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=8).hexdigest()


def trace_micro_batch(micro_batch: MicroBatch) -> MicroBatchTrace:
    """The record of a micro-batch, as JSON types, after its random numbers are seeded."""
    return {
        "index": micro_batch.index,
        "weight": micro_batch.num_targets,
        "samples": sample_digests(micro_batch.batch, micro_batch.num_samples),
        "random": digest(torch.get_rng_state()),  # dropout on the CPU draws from it
    }


def sample_digests(batch: Any, num_samples: int) -> list[str]:
    """A digest for each sample of a collated batch: of the sample's part of every tensor whose
    first dimension counts samples, and of everything else."""
    parts = [hashlib.blake2b(digest_size=8) for _ in range(num_samples)]

    def include(tensor: Tensor) -> Tensor:
        by_sample = tensor.ndim > 0 and len(tensor) == num_samples
        for index, part in enumerate(parts):
            part.update(tensor_bytes(tensor[index] if by_sample else tensor))
        return tensor

    map_tensors(batch, include)
    return [part.hexdigest() for part in parts]


class Observer:
    """Fills the empty `trace` of `model`. All ranks make the calls that may communicate, at the
    same places.

    It watches `update` and `publish` of a strategy's shards, which may step with separate
    optimizers; without a `reducer`, the optimizer's `step`. `whole` asks the reducer for whole
    weights and states, which ends a round of ranks that step alone (`sync/periodic.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None = None,
        *,
        whole: bool = True,
    ) -> None:
        self.trace = trace
        self._model, self._optimizer = model, optimizer
        self._shards = None if reducer is None else reducer.shards
        self._whole = self._shards if whole else None
        self._watched: Any = optimizer if reducer is None else reducer.shards
        self._method = "step" if reducer is None else "update"
        self._original = getattr(self._watched, self._method)
        setattr(self._watched, self._method, self._update)
        if self._shards is not None:
            self._publish_original = self._shards.publish
            self._shards.publish = self._publish
        self._now = self._state()

    def begin(self, number: int) -> None:
        """Start the record of a step, before its first micro-batch."""
        self.trace.steps.append(StepTrace(number, self._now, self._now))

    def micro_batch(self, micro_batch: MicroBatch) -> None:
        """Record a micro-batch before its forward, after its random numbers are seeded."""
        self.trace.steps[-1].micro_batches.append(trace_micro_batch(micro_batch))

    def end(self, loss: float, weight: float, norm: float | None) -> None:
        """Record what the step reported and its state, after the optimizer."""
        step = self.trace.steps[-1]
        step.loss, step.weight, step.norm = loss, weight, norm
        step.after = self._now = self._state()

    def close(self) -> None:
        """Stop watching."""
        delattr(self._watched, self._method)
        if self._shards is not None:
            del self._shards.publish

    def _update(self, *arguments: Any) -> None:
        """Replaces the optimizer's step: record gradients and weights around it."""
        step = self.trace.steps[-1]
        step.gradient = self._gradients()
        step.at_step = self._weights()
        self._original(*arguments)
        # Weights of equal ranks are whole once published; if ranks drift, that is a mean.
        if self._shards is None or not self._shards.equal_replicas:
            step.updated = self._weights()

    def _publish(self) -> Work:
        """Replaces the strategy's `publish`: record the weights after it."""
        work, step = self._publish_original(), self.trace.steps[-1]
        if self._shards is not None and self._shards.equal_replicas and step.at_step:
            work.wait()
            step.updated = self._weights()
        return work

    def _gradients(self) -> dict[str, Tensor | None]:
        """Copies of the mean gradients of whole parameters; all ranks call it."""
        named = trainable(self._model)
        names = clean_names(name for name, _ in named).values()
        if self._shards is not None:
            found = self._shards.whole_gradients()
        else:
            found = [None if p.grad is None else whole(p.grad) for _, p in named]
        return {
            name: None if gradient is None else _copy(gradient)
            for name, gradient in zip(names, found, strict=True)
        }

    def _weights(self) -> Tensors:
        read = self._model.state_dict if self._whole is None else self._whole.full_weights
        state = pack_weights(read())
        return {name: _copy(state[name]) for name in self.trace.parameters}

    def _state(self) -> State:
        weights, buffers = self._weights(), pack_weights(dict(self._model.named_buffers()))
        if self._whole is not None:
            self._whole.gather(self._optimizer)
        tensors, description = pack_optimizer(self._optimizer, self._model.named_parameters())
        optimizer = map_tensors(tensors, _copy)
        if self._whole is not None:
            self._whole.scatter(self._optimizer)
        extra = {} if self._shards is None else self._shards.state_tensors()
        return State(
            weights=weights,
            buffers=map_tensors(buffers, _copy),
            optimizer=optimizer,
            description=description,
            extra=map_tensors(extra, _copy),
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
