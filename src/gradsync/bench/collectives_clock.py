"""How long one operation takes, from a common begin to its end on the slowest rank.

[Note: A common begin] Ranks leave a barrier one after the other, up to a fraction of a millisecond
apart: longer than many operations take. Whoever is early would measure waiting, and an operation
that some ranks may begin alone (a broadcast) would seem to take no time at all. Ranks of one host
have one clock: they agree on a moment a little ahead, wait for it in a loop, and measure from that
moment. A repetition for which a rank came late (the system gave its core to another one) did not
begin together and is dropped; unless there are more ranks than cores, which cannot be in time.
Ranks of several hosts measure from the end of a barrier. On a GPU that barrier is a collective on
the same stream, and the time is between two events on it, read when the device is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsync.bench.statistics import percentile
from gradsync.comm.base import Communicator
from gradsync.runtime.machine import usable_cores
from gradsync.world import World

_TRIALS = 30
_SHORTEST_NS, _LONGEST_NS = 50_000, 2_000_000
_LATE_S, _LATE_PART = 5e-6, 0.02
"""A rank may be as late as the longer of these: seconds, part of the operation's time."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One repetition."""

    seconds: float
    """From the common begin to the end."""
    late_s: float = 0.0
    """From the common begin to the real one."""


def clock_for(world: World, comm: Communicator, device: torch.device) -> Clock:
    """The best one there is; all ranks call it."""
    if device.type == "cuda":
        return EventClock(comm, device)
    return MomentClock(comm) if world.one_host else Clock(comm)


def slowest(comm: Communicator, laps: list[Lap]) -> list[Lap]:
    """The longest time of each repetition and its latest begin, over all ranks.

    One all-reduce, float64 [2, n], on the CPU.
    """
    found = torch.tensor(
        [[lap.seconds for lap in laps], [lap.late_s for lap in laps]], dtype=torch.float64
    )
    comm.all_reduce(found, "max").wait()
    return [Lap(*pair) for pair in found.T.tolist()]


def in_time(laps: list[Lap]) -> list[float]:
    """Seconds of the repetitions that began together; of the least late one when none did."""
    kept = [lap.seconds for lap in laps if lap.late_s <= max(_LATE_S, _LATE_PART * lap.seconds)]
    return kept or [min(laps, key=lambda lap: lap.late_s).seconds]


class Clock:
    """Times an operation on all ranks at once, each repetition from the end of a barrier: for CPU
    ranks of several hosts."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        begin = time.perf_counter()
        self.time(lambda: None, _TRIALS)
        [lap] = slowest(comm, [Lap((time.perf_counter() - begin) / _TRIALS)])
        self.overhead_s = lap.seconds
        """Cost of each repetition besides the operation, about, seconds; alike on all ranks."""

    def time(self, run: Callable[[], None], repetitions: int) -> list[Lap]:
        """Each repetition on this rank; all ranks call it."""
        laps = []
        for _ in range(repetitions):
            self._comm.barrier()
            begin = time.perf_counter()
            run()
            laps.append(Lap(time.perf_counter() - begin))
        return laps


class MomentClock(Clock):
    """See [Note: A common begin]; for CPU ranks of one host."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._crowded = comm.world_size > usable_cores()
        late = []
        for _ in range(_TRIALS):
            agreed_ns = self._agree()
            late.append(time.perf_counter_ns() - agreed_ns)
        ahead_s = 2e-9 * percentile(late, 90)
        [longest] = slowest(comm, [Lap(ahead_s)])
        self._ahead_ns = int(min(max(longest.seconds * 1e9, _SHORTEST_NS), _LONGEST_NS))
        self.overhead_s = 2e-9 * self._ahead_ns

    def time(self, run: Callable[[], None], repetitions: int) -> list[Lap]:
        """See `Clock.time`."""
        laps = []
        for _ in range(repetitions):
            begin = self._agree() + self._ahead_ns
            while time.perf_counter_ns() < begin:
                if self._crowded:
                    os.sched_yield()
            late = 0 if self._crowded else time.perf_counter_ns() - begin
            run()
            laps.append(Lap((time.perf_counter_ns() - begin) * 1e-9, late * 1e-9))
        return laps

    def _agree(self) -> int:
        """When the last rank came, nanoseconds: one all-reduce, int64 [1], on the CPU."""
        now = torch.tensor([time.perf_counter_ns()])
        self._comm.all_reduce(now, "max").wait()
        return int(now)


class EventClock(Clock):
    """For ranks with a CUDA device each."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._small = torch.zeros(1, device=device)
        super().__init__(comm)

    def time(self, run: Callable[[], None], repetitions: int) -> list[Lap]:
        """See `Clock.time`."""
        laps = []
        for _ in range(repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # All ranks, float32 [1]: behind it on the stream, all begin together.
            self._comm.all_reduce(self._small).wait()
            begin.record()
            run()
            end.record()
            end.synchronize()
            laps.append(Lap(begin.elapsed_time(end) * 1e-3))
        return laps
