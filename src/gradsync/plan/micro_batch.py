"""The largest micro-batch that runs: which one to try next, and what all ranks agree on.

Only sizes that a step can be cut into are ever tried. Ranks call `next_size` with the same trials,
so all of them try the same sizes in the same order, and the smallest of them decides.

[Note: A rank without memory] One rank may run out of memory where the others do not. So an attempt
holds no communication at all: each rank runs alone, whatever becomes of it is a value, and every
rank then comes to the round's one small all-reduce with it. What comes out is the same on all ranks
and is all that the next size depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator

if TYPE_CHECKING:
    from gradsync.plan.probe import Cost

_IMBALANCE = 1.125
"""How much more than need be the busiest rank may have to do: with few large leaves, shares that
differ by one leaf differ by much."""
_GAIN = 0.97
"""A larger micro-batch pays when a sequence takes less than this share of its time before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The outcome of one size; equal on all ranks."""

    size: int  # Sequences of a leaf
    fits: bool  # On every rank, within its limit
    peak: float = 0.0  # Share of its limit that the fullest rank took
    slope: float = 0.0  # Added to it by one more sequence, on the rank where it adds most
    seconds: float = 0.0  # Forward and backward of the leaf, on the slowest rank

    @property
    def seconds_per_sequence(self) -> float:
        """How dear a sequence is in leaves of this size."""
        return self.seconds / self.size


def legal_sizes(sequences: int, world_size: int, *, equal_leaves: bool = False) -> tuple[int, ...]:
    """Micro-batches, ascending, that cut a step's `sequences` into leaves for `world_size` ranks.

    Each divides `sequences`, leaves no rank without a leaf (with `equal_leaves`: gives all equally
    many), and shares leaves out so evenly that the busiest rank has at most an eighth more
    sequences than under the smallest size.
    """
    below_root = [size for size in range(1, isqrt(sequences) + 1) if sequences % size == 0]
    loads = {}
    for size in sorted({*below_root, *(sequences // size for size in below_root)}):
        leaves = sequences // size
        if leaves >= world_size and not (equal_leaves and leaves % world_size):
            loads[size] = -(-leaves // world_size) * size
    least = min(loads.values(), default=0)
    return tuple(size for size, load in loads.items() if load <= _IMBALANCE * least)


def next_size(sizes: Sequence[int], trials: Sequence[Trial], *, careful: bool) -> int | None:
    """The size to try now; None when there is nothing more to learn.

    It grows by at most doubling while sizes fit, then halves the gap between the largest that did
    and the smallest that did not. `careful`, where nothing stops a process that takes too much (a
    CPU), tries nothing that is predicted beyond the limit, and grows only while growing pays.
    """
    if not trials:
        return min(sizes, default=None)
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        return None  # not even the smallest runs
    good = max(fitting, key=lambda trial: trial.size)
    bad = min((trial.size for trial in trials if not trial.fits), default=None)
    if careful and bad is None and len(trials) > 1:
        before, now = (trial.seconds_per_sequence for trial in trials[-2:])
        if now > _GAIN * before:  # the last growth did not make a sequence cheaper
            return None
    open_sizes = [size for size in sizes if good.size < size and (bad is None or size < bad)]
    if careful:
        open_sizes = [size for size in open_sizes if predicted(good, size) <= 1]
    if not open_sizes:
        return None
    if bad is not None:
        return open_sizes[len(open_sizes) // 2]
    return max((size for size in open_sizes if size <= 2 * good.size), default=open_sizes[0])


def predicted(trial: Trial, size: int) -> float:
    """Share of the limit that `size` will take, on the line through `trial`."""
    return trial.peak + trial.slope * (size - trial.size)


def chosen_size(trials: Sequence[Trial], *, careful: bool) -> int | None:
    """The largest size that fits, None: none does. If `careful`, of those that are as fast as any:
    a core is busy with one sequence, so there larger ones may only take more memory."""
    fitting = [trial for trial in trials if trial.fits]
    if careful:
        best = min((trial.seconds_per_sequence for trial in fitting), default=0.0)
        fitting = [trial for trial in fitting if _GAIN * trial.seconds_per_sequence <= best]
    return max((trial.size for trial in fitting), default=None)


def try_sizes(
    comm: Communicator,
    attempt: Callable[[int], Cost | None],
    sizes: Sequence[int],
    *,
    limit_bytes: int,
    careful: bool,
) -> tuple[Trial, ...]:
    """The outcome of those of the `legal_sizes` that were worth trying, the same on all ranks.

    `attempt` runs one size on this rank, without communication (None: out of memory), within
    `limit_bytes`. One all-reduce (maximum, float64 [4] on the CPU) after each size.
    """
    import torch  # planning does without

    trials: list[Trial] = []
    ran: list[tuple[int, Cost]] = []
    while (size := next_size(sizes, trials, careful=careful)) is not None:
        cost = attempt(size)
        told = torch.tensor(_message(size, cost, ran, limit_bytes), dtype=torch.float64)
        comm.all_reduce(told, "max").wait()
        failed, peak, slope, seconds = told.tolist()
        trials.append(Trial(size=size, fits=not failed, peak=peak, slope=slope, seconds=seconds))
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
    below, low = (0, cost.held_bytes) if smaller is None else (smaller[0], smaller[1].peak_bytes)
    slope = max((cost.peak_bytes - low) / (size - below), 0.0)
    peak = cost.peak_bytes / limit_bytes
    return float(peak > 1), peak, slope / limit_bytes, cost.seconds
