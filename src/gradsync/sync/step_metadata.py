"""The one small message of a step: values that only the host knows, summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import RunError


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Result of the message, equal on all ranks."""

    loss: list[float]
    """Sum of the ranks' `LossSum.message()`."""
    stop: bool
    """Whether any rank wants to stop."""
    discard: bool
    """Whether any rank wants to discard this step's gradients."""
    used: list[bool]
    """For each trainable parameter, whether any rank has a gradient for it."""
    counts: list[float]
    """Sums over ranks of their counts (leaves that changed a buffer)."""
    alike: bool
    """Whether all ranks sent the same digest."""
    changed: bool
    """Whether any rank saw weights change between steps."""
    late: bool
    """Whether any rank takes part in its optimizer's own step only."""


def agree_on_metadata(
    comm: Communicator,
    used: Sequence[bool],
    counts: Sequence[int] = (),
    loss: Sequence[float] = (),
    *,
    stop: bool = False,
    discard: bool = False,
    number: int = 0,
    digest: Sequence[int] = (0, 0),
    changed: bool = False,
    late: bool = False,
) -> StepMetadata:
    """Exchange the step's metadata: one all-reduce, whole group, on the CPU.

    float64 [10 + loss + parameters + counts]. Never waits for the device; overlaps the buckets.

    Args:
        comm: the ranks.
        used: for each trainable parameter, whether this rank has a gradient for it.
        counts: for each buffer, the number of leaves that changed it here.
        loss: from `LossSum.message()`.
        stop: whether this rank wants to stop.
        discard: whether this rank wants the gradients discarded.
        number: number of the handle; all ranks must be at the same one.
        digest: two numbers below 2^20, equal on ranks that step alike; see `optimizers.py`.
        changed: whether this rank's weights changed since the last step; see `check_replicas.py`.
        late: whether this rank takes part in its optimizer's own step; see `user_loop.py`.

    Raises:
        RunError: ranks are at the steps of different models.
    """
    # Equal numbers, and only those, have W n and W n^2 as their sums.
    marks = [power for n in (number, *digest) for power in (n, n**2)]
    parts = ([stop, discard, changed, late], marks, loss, used, counts)
    message = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    comm.all_reduce(message).wait()
    flags, agreed_marks, losses, any_use, sums = (
        part.tolist() for part in message.split([len(part) for part in parts])
    )
    equal = [comm.world_size * mark for mark in marks] == agreed_marks
    if agreed_marks[:2] != [comm.world_size * number, comm.world_size * number**2]:
        raise RunError(
            f"rank {comm.rank}: ranks synchronise different models at the same time: models that "
            "share a process group must take turns in one order on all ranks; or replicate them "
            "together, as one torch.nn.ModuleList"
        )
    stops, discards, changes, lates = (number > 0 for number in flags)
    any_used = [use > 0 for use in any_use]
    return StepMetadata(
        losses, stops, discards, any_used, sums, alike=equal, changed=changes, late=lates
    )
