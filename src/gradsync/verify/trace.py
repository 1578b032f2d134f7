"""What one run of one rank leaves behind, step by step, and its digest for the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.tensor_file import tensor_bytes

Tensors = dict[str, Tensor]
Digests = dict[str, str]


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
    """Digest of torch's random state before the forward."""


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
    """Of the mean gradient before clipping, as the run saw it."""
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
    """What the strategy itself keeps, such as an outer momentum."""
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

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step."""
        return [step.loss for step in self.steps]


TENSOR_PARTS = ("before", "at_step", "gradient", "updated", "after", "buffers", "state")


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
    for part in TENSOR_PARTS:
        tensors: Mapping[str, Tensor | None] = getattr(step, part)
        document[part] = {name: digest(tensor) for name, tensor in tensors.items()}
    return document


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


def random_digest() -> str:
    """Digest of the state that dropout on the CPU draws from."""
    return digest(torch.get_rng_state())


def _tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for key in sorted(batch) for tensor in _tensors_in(batch[key])]
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in _tensors_in(part)]
    return []
