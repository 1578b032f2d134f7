"""The one small message of a step: what only the host knows, summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class Agreement:
    """Equal on all ranks."""

    loss: list[float]
    """Sum of the ranks' `LossSum.message()`."""
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
    loss: Sequence[float] = (),
    stop: bool = False,
) -> Agreement:
    """One all-reduce, whole group, float64 [1 + loss + parameters + counts], always on the CPU.

    It never waits for the device, and overlaps the buckets that are still under way.
    """
    parts = ([float(stop)], loss, used, counts)
    message = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    comm.all_reduce(message).wait()
    (stops,), losses, any_use, sums = (
        part.tolist() for part in message.split([len(part) for part in parts])
    )
    return Agreement(losses, stops > 0, [use > 0 for use in any_use], sums)
