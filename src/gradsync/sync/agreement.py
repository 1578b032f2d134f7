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


def agree(
    comm: Communicator, used: Sequence[bool], *, loss_sum: float, weight: float, stop: bool
) -> Agreement:
    """One all-reduce, whole group, float64 [3 + number of parameters], always on the CPU.

    It never waits for the device, and overlaps the buckets that are still under way.
    """
    message = torch.tensor([loss_sum, weight, float(stop), *used], dtype=torch.float64)
    comm.all_reduce(message).wait()
    loss_sum, weight, stops, *counts = message.tolist()
    return Agreement(loss_sum, weight, stops > 0, [count > 0 for count in counts])
