"""Waiting for flags of other ranks: briefly at full speed, then yielding more and more time.

spin  (tens of microseconds, only with a core for each rank)
yield (about a millisecond): let another rank on this core run
sleep (50 us growing to 1 ms): computation elsewhere gets the core; check that peers live
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from gradsync.errors import LostPeerError
from gradsync.runtime.machine import cgroup_cores

_SPINS = 300
"""About 100 us of polling."""
_YIELD_S = 0.001
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_LOOK_AFTER_PEERS_S = 0.05


class Patience:
    """Waits on behalf of one rank.

    Args:
        rank: this rank.
        pids: process id of each rank.
        timeout_s: longest wait, in seconds.
    """

    def __init__(self, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self._rank, self._pids, self.timeout_s = rank, list(pids), timeout_s
        cores = cgroup_cores() or os.cpu_count() or 1
        threads_of_one = len(set(pids)) < len(pids)  # spinning, one would hold Python's lock
        self._spins = _SPINS if len(pids) <= cores and not threads_of_one else 0
        self._yield_s = 0.0 if threads_of_one else _YIELD_S
        self._doors: dict[int, int] = {}
        for peer, pid in enumerate(pids):
            if pid != os.getpid():
                try:
                    self._doors[peer] = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise LostPeerError(f"rank {rank}: rank {peer} has ended") from None

    def until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        left: Callable[[], list[int]],
        what: str,
    ) -> None:
        """Return once `ready()` is true.

        Args:
            ready: checks the flags.
            missing: the ranks that have not arrived yet.
            left: the ranks among them that have left for good.
            what: this rank's operation, for messages.

        Raises:
            LostPeerError: one of them has ended or left, or the time is up.
        """
        for _ in range(self._spins):
            if ready():
                return
        began = now = time.monotonic()
        while now - began < self._yield_s:
            if ready():
                return
            os.sched_yield()
            now = time.monotonic()
        pause, looked = _SHORTEST_SLEEP_S, now
        while not ready():
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)
            now = time.monotonic()
            if now - looked > _LOOK_AFTER_PEERS_S:
                looked = now
                # Before processes: a rank that left because another ended must not hide that one.
                deserters = left()
                gone = self._ended()
                if not ready():  # the flag may be the last thing that a peer wrote before it ended
                    self._complain(missing(), gone, deserters, what, waited_s=now - began)

    def _complain(
        self,
        waited_for: list[int],
        gone: set[int],
        deserters: list[int],
        what: str,
        *,
        waited_s: float,
    ) -> None:
        lost = [peer for peer in waited_for if peer in gone]
        if lost:
            names = ", ".join(f"{peer} (process {self._pids[peer]})" for peer in lost)
            raise LostPeerError(
                f"rank {self._rank}: rank {names} has ended while its part of a shared-memory "
                "operation was awaited"
            )
        if deserters:
            raise LostPeerError(
                f"rank(s) {', '.join(map(str, deserters))} left while this rank waits for them in "
                f"{what}"
            )
        if waited_s > self.timeout_s:
            raise LostPeerError(
                f"rank {self._rank}: waited {waited_s:.0f} s for rank(s) "
                f"{', '.join(map(str, waited_for))} in a shared-memory operation"
            )

    def _ended(self) -> set[int]:
        if not self._doors:
            return set()
        # poll, not select: descriptors may have high numbers.
        poll = select.poll()
        for door in self._doors.values():
            poll.register(door, select.POLLIN)
        readable = {door for door, _ in poll.poll(0)}
        return {peer for peer, door in self._doors.items() if door in readable}

    def close(self) -> None:
        """Close the process descriptors."""
        while self._doors:
            os.close(self._doors.popitem()[1])
