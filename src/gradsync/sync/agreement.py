"""The one small message of a step: what only the host knows, summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class Agreement:
    """Equal on all ranks."""

    loss_sum: float
    """Sum of the losses that were on the CPU."""
    weight: float
    """Number of targets (or samples) in the global batch."""
    stop: bool
    """Whether any rank wants to stop."""
    used: list[bool]
    """For each trainable parameter, whether any rank has a gradient for it."""
    counts: list[float]
    """Sums of what each rank counted (leaves that changed a buffer)."""


def agree(
    comm: Communicator,
    used: Sequence[bool],
    counts: Sequence[int] = (),
    *,
    loss_sum: float = 0.0,
    weight: float = 0.0,
    stop: bool = False,
) -> Agreement:
    """One all-reduce, whole group, float64 [3 + parameters + counts], always on the CPU.

    It never waits for the device, and overlaps the buckets that are still under way.
    """
    message = torch.tensor([loss_sum, weight, float(stop), *used, *counts], dtype=torch.float64)
    comm.all_reduce(message).wait()
    loss_sum, weight, stops, *rest = message.tolist()
    any_use, sums = rest[: len(used)], rest[len(used) :]
    return Agreement(loss_sum, weight, stops > 0, [use > 0 for use in any_use], sums)
