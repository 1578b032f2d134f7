"""All ranks try the same sizes and agree on each, so that the smallest of them decides.

[Note: A rank without memory] One rank may run out of memory where the others do not. So an attempt
holds no communication at all: each rank runs alone, whatever becomes of it is a value, and every
rank then comes to the round's one small all-reduce with it. What comes out is the same on all ranks
and is all that the next size depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.comm.base import Communicator
from gradsync.hardware.memory.probe import Cost
from gradsync.hardware.micro_batch.search import Trial, next_size


def try_sizes(
    comm: Communicator,
    attempt: Callable[[int], Cost | None],
    sizes: Sequence[int],
    *,
    limit_bytes: int,
    careful: bool,
) -> tuple[Trial, ...]:
    """What became of the sizes that were worth trying, the same on all ranks.

    One all-reduce (maximum, float64 [4] on the CPU) after each size.

    Args:
        comm: over the ranks that agree.
        attempt: runs one size on this rank, without communication; None: out of memory.
        sizes: equal on all ranks; see `legal_sizes`.
        limit_bytes: what this rank's attempts may take.
        careful: see `next_size`.
    """
    trials: list[Trial] = []
    ran: list[tuple[int, Cost]] = []
    while (size := next_size(sizes, trials, careful=careful)) is not None:
        cost = attempt(size)
        told = torch.tensor(_message(size, cost, ran, limit_bytes), dtype=torch.float64)
        comm.all_reduce(told, "max").wait()
        failed, peak, slope, seconds = told.tolist()
        fits = not failed
        trials.append(Trial(size=size, fits=fits, peak=peak, slope=slope, seconds=seconds))
        if cost is not None:
            ran.append((size, cost))
    return tuple(trials)


def _message(
    size: int, cost: Cost | None, ran: Sequence[tuple[int, Cost]], limit_bytes: int
) -> tuple[float, float, float, float]:
    """Did it fail, its peak, what one more sequence adds (both as shares of the limit), seconds."""
    if cost is None:
        return 1.0, 0.0, 0.0, 0.0
    smaller = max(((s, c) for s, c in ran if s < size), key=lambda pair: pair[0], default=None)
    if smaller is None:
        slope = (cost.peak_bytes - cost.held_bytes) / size
    else:
        slope = (cost.peak_bytes - smaller[1].peak_bytes) / (size - smaller[0])
    peak, slope = cost.peak_bytes / limit_bytes, max(slope, 0.0) / limit_bytes
    return float(peak > 1), peak, slope, cost.seconds
