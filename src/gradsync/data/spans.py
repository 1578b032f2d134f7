"""Which stream positions a step covers, cut into leaves, for one rank. Pure index maths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradsync.data.plan import share


class LeafSpan(NamedTuple):
    """One leaf: stream positions `start .. start+count-1`."""

    index: int
    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """One step as one rank sees it."""

    num_leaves: int
    """Leaves of the step, over all ranks."""
    leaves: tuple[LeafSpan, ...]
    """The leaves of this rank, in order."""
    everyone_has_leaves: bool
    """True when no rank is without a leaf, which is the same answer on all ranks."""


def cut_step(
    start: int, stop: int, *, micro_batch_size: int, rank: int, world_size: int
) -> StepSpan:
    """Cut positions `start .. stop-1` into leaves of `micro_batch_size` (the last may be shorter).

    The leaves depend on the positions alone; the world size only says who owns which. A rank may
    have none when there are fewer leaves than ranks.
    """
    num_leaves = -(-(stop - start) // micro_batch_size)
    leaves = []
    for index in share(num_leaves, rank, world_size):
        first = start + index * micro_batch_size
        leaves.append(LeafSpan(index, first, min(micro_batch_size, stop - first)))
    return StepSpan(
        num_leaves=num_leaves,
        leaves=tuple(leaves),
        everyone_has_leaves=num_leaves >= world_size,
    )
