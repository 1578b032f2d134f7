"""One micro-batch on its way to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED_TARGET = -100
"""Targets with this value count for nothing; torch's `cross_entropy` has the same default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One micro-batch, collated and on the device."""

    index: int
    """Place in the step, counted over all ranks."""
    step: int
    """Number of the step in the stream, from 0."""
    batch: Any
    """What the collate function made of the samples."""
    num_samples: int
    """Samples in this leaf."""
    num_targets: int
    """Weight of this leaf in the mean loss: targets other than -100, else samples."""
    is_last: bool
    """True on a rank's last leaf, but only when every rank has one in this step, so that all ranks
    synchronise or none does."""

    @property
    def inputs(self) -> Any:
        """First half of an (inputs, targets) batch."""
        return self.batch[0]

    @property
    def targets(self) -> Any:
        """Second half of an (inputs, targets) batch."""
        return self.batch[1]


def make_leaf(
    batch: Any, *, index: int, step: int, num_samples: int, is_last: bool, device: torch.device
) -> Leaf:
    """A `Leaf` with its targets counted and its tensors on `device`."""
    num_targets = count_targets(batch, num_samples)  # before the move, see there
    return Leaf(
        index=index,
        step=step,
        batch=move_to(batch, device),
        num_samples=num_samples,
        num_targets=num_targets,
        is_last=is_last,
    )


def count_targets(batch: Any, num_samples: int) -> int:
    """Targets that are not -100 when `batch` is a pair with integer targets, else `num_samples`.

    Call it before the batch moves to a GPU: there the count would wait for the device.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        targets = batch[1]
        if isinstance(targets, Tensor) and targets.ndim and not targets.is_floating_point():
            return int((targets != IGNORED_TARGET).sum())
    return num_samples


def move_to(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; tuples and lists are rebuilt, mappings become
    dicts.

    Copies to a GPU go through page-locked memory and do not wait.
    """
    if isinstance(batch, Tensor):
        if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_to(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch
