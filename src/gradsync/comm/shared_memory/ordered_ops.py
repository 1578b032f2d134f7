"""Operations in which every rank does a share, in a fixed order, without a lock.

An operation has two points that all ranks pass:

    rank 0   prepare ─ arrive ─┐             ┌─ share ─ finish ─┐             ┌─ take
    rank 1   prepare ─ arrive ─┴─ all there ─┴─ share ─ finish ─┴─ all done ──┴─ take

Operations are numbered alike on all ranks. A share begins only when all ranks have finished the
previous operation, so it may read and write any rank's memory. Submitting does not wait: the queue
advances as far as it can whenever this rank submits or waits again. With one core per rank, a
thread that runs during backward could do no more.

[Note: Order of writes] A rank writes data, then its flag; a peer reads the flag, then the data.
Neither a lock nor a fence is needed in between, because x86-64 shows one core's writes to others in
their order, and reads are not reordered among themselves. Other processors may reorder both:
`share_memory` refuses them. A flag is an aligned 8-byte word with one writer.

[Note: Ring of signatures] The signature of a rank's operation n stays in slot n % NUM_SIGNATURES of
its page until the rank arrives at operation n + NUM_SIGNATURES. Peers read the slot before they
finish n; so if ranks arrive only after all have finished the operation NUM_SIGNATURES earlier,
nothing unread is overwritten, and every operation is compared, however far a rank runs ahead.
"""

from __future__ import annotations

import os
import select
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradsync.comm.base import Work
from gradsync.errors import LatePeerError, LostPeerError, RunError
from gradsync.runtime.machine import cgroup_cores

# A page in words of 8 bytes. Words polled by different ranks are on separate cache lines (8 words).
PAGE_BYTES = 4096
ARRIVED, DONE = 0, 8
"""The last operation for which the rank's data are ready, and the last whose share it has done."""
_CLOSED = 16
_NOTES, _NUM_NOTES = 24, 8  # twice
_SIGNATURES = 40
NUM_SIGNATURES = 256
"""Most operations that a rank may have arrived at before a peer has finished the first of them."""
_MASK = (1 << 63) - 1

_SPINS = 300
"""About 100 us of polling."""
_YIELD_S = 0.001
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_LOOK_AFTER_PEERS_S = 0.05

Action = Callable[[], object]


class Flags:
    """One page per rank, uint8 [PAGE_BYTES], that all ranks read and only `rank` writes: its
    progress, and a few numbers."""

    def __init__(self, rank: int, pages: Sequence[Tensor]) -> None:
        self._words = [page.numpy().data.cast("B").cast("q") for page in pages]
        self._mine = self._words[rank]
        self._notes = _NOTES
        self._others = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]

    def arrive(self, number: int, signature: int) -> None:
        """Announce that data for operation `number` are ready; `signature` identifies it. Call it
        once all have finished `number - NUM_SIGNATURES`: [Note: Ring of signatures]."""
        self._mine[_SIGNATURES + number % NUM_SIGNATURES] = signature & _MASK
        self._mine[ARRIVED] = number

    def finish(self, number: int) -> None:
        """Announce that this rank has done its share."""
        self._mine[DONE] = number

    def leave(self) -> None:
        """Announce that this rank no longer takes part."""
        self._mine[_CLOSED] = 1

    def behind(self, point: int, number: int) -> list[int]:
        """Peers that have not reached `point` (ARRIVED or DONE) of operation `number`."""
        return [peer for peer, words in self._others if words[point] < number]

    def left(self, peers: Sequence[int]) -> list[int]:
        """The ranks among `peers` that have left."""
        return [peer for peer in peers if self._words[peer][_CLOSED]]

    def strangers(self, number: int, signature: int) -> list[int]:
        """Peers with another operation of that number; valid once all have arrived."""
        slot = _SIGNATURES + number % NUM_SIGNATURES
        return [peer for peer, words in self._others if words[slot] != signature & _MASK]

    def note(self, values: Sequence[int]) -> None:
        """Publish up to 8 numbers, which peers may read after the next `arrive`. Two places take
        turns, since a peer may still read the last numbers."""
        assert len(values) <= _NUM_NOTES
        self._notes = 2 * _NOTES + _NUM_NOTES - self._notes
        for place, value in enumerate(values):
            self._mine[self._notes + place] = value

    def notes(self, count: int) -> list[list[int]]:
        """The first `count` numbers published by every rank."""
        return [[words[self._notes + place] for place in range(count)] for words in self._words]


class Patience:
    """Waits for flags on behalf of one rank, for `timeout_s` at most; `pids` are all ranks'.

    spin  (tens of microseconds, only with a core for each rank)
    yield (about a millisecond): let another rank on this core run
    sleep (50 us growing to 1 ms): computation elsewhere gets the core; check that peers are alive
    """

    def __init__(self, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self._rank, self._pids, self.timeout_s = rank, list(pids), timeout_s
        cores = cgroup_cores() or os.cpu_count() or 1
        threads_of_one = len(set(pids)) < len(pids)  # a spinning thread would hold the GIL
        self._spins = _SPINS if len(pids) <= cores and not threads_of_one else 0
        self._yield_s = 0.0 if threads_of_one else _YIELD_S
        self._doors: dict[int, int] = {}
        for peer, pid in enumerate(pids):
            if pid != os.getpid():
                try:
                    self._doors[peer] = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise LostPeerError(f"rank {rank}: rank {peer} has ended") from None

    def until_none(
        self, missing: Callable[[], list[int]], left: Callable[[list[int]], list[int]], what: str
    ) -> None:
        """Return once no rank is `missing()` from `what`; LostPeerError: one of them has ended, or
        is among the ranks that have `left`, or the time is up."""
        for _ in range(self._spins):
            if not missing():
                return
        began = now = time.monotonic()
        while now - began < self._yield_s:
            if not missing():
                return
            os.sched_yield()
            now = time.monotonic()
        pause, looked = _SHORTEST_SLEEP_S, now
        while missing():
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)
            now = time.monotonic()
            if now - looked > _LOOK_AFTER_PEERS_S:
                looked = now
                # Before processes: a rank that left because another ended must not hide it.
                deserters = left(missing())
                gone = self._ended()
                # Checked last: the flag may be the last thing that a peer wrote before it ended.
                if awaited := missing():
                    self._complain(awaited, gone, deserters, what, waited_s=now - began)

    def _complain(
        self,
        awaited: list[int],
        gone: set[int],
        deserters: list[int],
        what: str,
        *,
        waited_s: float,
    ) -> None:
        lost = [peer for peer in awaited if peer in gone]
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
            raise LatePeerError(
                f"rank {self._rank}: waited {waited_s:.0f} s for rank(s) "
                f"{', '.join(map(str, awaited))} in a shared-memory operation"
            )

    def _ended(self) -> set[int]:
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


@dataclass(slots=True, eq=False)
class OrderedOp:
    """One operation. Each action runs at most once."""

    what: str
    """Description, for messages."""
    key: tuple[object, ...] = ()
    """Further values that must be equal on all ranks for the same operation."""
    prepare: Action | None = None
    """Write data for the peers, as soon as no peer needs the previous data."""
    share: Action | None = None
    """Do this rank's part, once all have arrived."""
    take: Action | None = None
    """Use what peers have written, once all have finished."""
    alone: bool = False
    """True when this rank need not wait for the peers to finish their shares."""
    number: int = 0
    signature: int = 0
    """Hash of `what` and `key`: equal for the same operation in any process."""
    arrived: bool = False
    shared: bool = False
    over: bool = False


class _Pending(NamedTuple):
    """The `Work` of a submitted operation."""

    ops: OrderedOps
    op: OrderedOp

    def wait(self) -> None:
        """See `Work.wait`. LostPeerError: a peer ended, left, or did not arrive in time; RunError:
        peers run another operation."""
        self.ops.complete(self.op)


class OrderedOps:
    """This rank's queue of operations; for one thread at a time."""

    def __init__(self, flags: Flags, patience: Patience) -> None:
        self._flags, self._patience = flags, patience
        self._queue: deque[OrderedOp] = deque()
        self._number = 0
        self.broken: RunError | None = None
        """Why it is closed: an operation has failed, or its owner called `close`."""

    def submit(self, op: OrderedOp) -> Work:
        """Add an operation; raises its failure, or that of an earlier one (RunError)."""
        if self.broken is not None:
            raise self.broken
        self._number += 1
        op.number = self._number
        op.signature = zlib.crc32(repr((op.what, op.key)).encode())
        early = op.prepare is None and (not self._queue or self._queue[-1].arrived)
        if early and not self._flags.behind(DONE, op.number - NUM_SIGNATURES):
            self._flags.arrive(op.number, op.signature)
            op.arrived = True
        self._queue.append(op)
        while self._queue and self._go_on(self._queue[0], waiting=False):
            self._queue.popleft()
        return _Pending(self, op)

    def complete(self, op: OrderedOp) -> None:
        """Wait for `op` and all before it."""
        while not op.over:
            if self.broken is not None:
                raise self.broken
            self._go_on(self._queue[0], waiting=True)
            self._queue.popleft()

    def close(self) -> None:
        """Drop pending operations, and the error that broke the queue."""
        self._queue.clear()
        self.broken = RunError("this shared-memory communicator is closed")

    def _go_on(self, op: OrderedOp, *, waiting: bool) -> bool:
        """Advance the queue's first operation as far as peers allow; returns whether it is over."""
        flags, number = self._flags, op.number
        if not op.arrived:
            if not self._all_at(DONE, number - 1, op, waiting=waiting):
                return False
            self._act(op, op.prepare)
            flags.arrive(number, op.signature)
            op.arrived = True
        if not op.shared:
            if not self._all_at(DONE, number - 1, op, waiting=waiting):
                return False
            if not self._all_at(ARRIVED, number, op, waiting=waiting):
                return False
            if strangers := flags.strangers(number, op.signature):
                raise self._break(
                    f"ranks call different operations at the same time: this rank {op.what}, "
                    f"rank(s) {', '.join(map(str, strangers))} something else (another operation, "
                    "shape, dtype, or memory in another place); does one rank alone save?"
                )
            self._act(op, op.share)
            op.shared = True
            flags.finish(number)
        if not op.alone and not self._all_at(DONE, number, op, waiting=waiting):
            return False
        self._act(op, op.take)
        op.prepare = op.share = op.take = None
        op.over = True
        return True

    def _all_at(self, point: int, number: int, op: OrderedOp, *, waiting: bool) -> bool:
        """Whether all peers have reached `point` of operation `number`; `waiting` waits for it."""
        flags = self._flags
        if not flags.behind(point, number):
            return True
        if waiting:
            try:
                self._patience.until_none(lambda: flags.behind(point, number), flags.left, op.what)
            except RunError as error:
                self._break(error)
                raise
        return waiting

    def _act(self, op: OrderedOp, action: Action | None) -> None:
        """Run an action; after a failure it must not run again, and peers must not wait for it."""
        if action is None:
            return
        try:
            action()
        except BaseException as error:
            self._break(f"this rank failed in {op.what}: {error!r}")
            raise

    def _break(self, error: RunError | str) -> RunError:
        """Stop all operations, and notify peers that wait for this rank."""
        self.broken = RunError(error) if isinstance(error, str) else error
        self._flags.leave()
        return self.broken
