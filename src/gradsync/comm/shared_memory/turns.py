"""Operations in which every rank does a share, in one order, without a lock.

A turn has two points that all ranks pass:

    rank 0   prepare ─ arrive ─┐             ┌─ share ─ finish ─┐             ┌─ take
    rank 1   prepare ─ arrive ─┴─ all there ─┴─ share ─ finish ─┴─ all done ──┴─ take

Turns are numbered alike on all ranks. A turn's share begins only when all ranks have finished the
turn before, so a share may read and write any rank's memory. Submitting a turn does not wait: all
progress that is possible is made whenever this rank submits or waits again. With one core per rank
a thread beside backward could do no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradsync.comm.shared_memory.flags import NUM_SIGNATURES, Flags
from gradsync.comm.shared_memory.waiting import Patience
from gradsync.errors import RunError

Action = Callable[[], object]


@dataclass(slots=True, eq=False)
class Turn:
    """One operation, and its `Work`. Each action runs at most once."""

    owner: Turns
    number: int
    what: str
    """Description, for messages."""
    signature: int
    """Equal on all ranks that do the same operation."""
    prepare: Action | None
    """Put data where peers read them, as soon as no peer needs the previous data."""
    share: Action | None
    """Do this rank's part, once all have arrived."""
    take: Action | None
    """Use what peers have written, once all have finished."""
    alone: bool
    """True when this rank need not wait for the peers to finish their shares."""
    arrived: bool = False
    shared: bool = False
    over: bool = False

    def wait(self) -> None:
        """See `Work.wait`.

        Raises:
            LostPeerError: a peer ended, left, or did not come in time.
            RunError: peers are doing something else.
        """
        self.owner.complete(self)


class Turns:
    """This rank's queue of turns; for one thread at a time."""

    def __init__(self, flags: Flags, patience: Patience) -> None:
        self._flags, self._patience = flags, patience
        self._queue: deque[Turn] = deque()
        self._number = 0
        self._broken: RunError | None = None

    @property
    def is_open(self) -> bool:
        """Whether the queue is not closed and no operation has failed."""
        return self._broken is None

    def submit(
        self,
        what: str,
        signature: int,
        *,
        prepare: Action | None = None,
        share: Action | None = None,
        take: Action | None = None,
        alone: bool = False,
    ) -> Turn:
        """Add a turn; the arguments are the fields of `Turn`.

        Raises:
            RunError: the failure of this turn, or of an earlier one.
        """
        if self._broken is not None:
            raise self._broken
        self._number += 1
        turn = Turn(self, self._number, what, signature, prepare, share, take, alone)
        early = prepare is None and (not self._queue or self._queue[-1].arrived)
        # Not too far ahead: [Note: Ring of signatures] in flags.py.
        if early and self._flags.all_finished(turn.number - NUM_SIGNATURES):
            self._arrive(turn)
        self._queue.append(turn)
        while self._queue and self._go_on(self._queue[0], waiting=False):
            self._queue.popleft()
        return turn

    def complete(self, turn: Turn) -> None:
        """Wait for `turn` and all before it."""
        while not turn.over:
            if self._broken is not None:
                raise self._broken
            self._go_on(self._queue[0], waiting=True)
            self._queue.popleft()

    def close(self) -> None:
        """Drop turns that were not waited for, and the error that broke the queue."""
        self._queue.clear()
        self._broken = RunError("this shared-memory communicator is closed")

    def _arrive(self, turn: Turn) -> None:
        self._flags.arrive(turn.number, turn.signature)
        turn.arrived = True

    def _go_on(self, turn: Turn, *, waiting: bool) -> bool:
        """Advance the first turn of the queue as far as peers allow; returns whether it is over."""
        flags, number = self._flags, turn.number
        before = number - 1
        if not turn.arrived:
            if not self._all_finished(before, turn, waiting=waiting):
                return False
            self._act(turn, turn.prepare)
            self._arrive(turn)
        if not turn.shared:
            if not self._all_finished(before, turn, waiting=waiting):
                return False
            if not flags.all_arrived(number):
                if not waiting:
                    return False
                self._wait(flags.all_arrived, flags.not_arrived, turn, number)
            if strangers := flags.strangers(number, turn.signature):
                raise self._break(
                    f"ranks call different operations at the same time: this rank {turn.what}, "
                    f"rank(s) {', '.join(map(str, strangers))} something else (another operation, "
                    "shape, dtype, or memory in another place)"
                )
            self._act(turn, turn.share)
            turn.shared = True
            flags.finish(number)
        if not turn.alone and not self._all_finished(number, turn, waiting=waiting):
            return False
        self._act(turn, turn.take)
        turn.prepare = turn.share = turn.take = None
        turn.over = True
        return True

    def _act(self, turn: Turn, action: Action | None) -> None:
        """Run an action; after a failure it must not run again, and peers must not wait for it."""
        if action is None:
            return
        try:
            action()
        except BaseException as error:
            self._break(f"this rank failed in {turn.what}: {error!r}")
            raise

    def _break(self, error: RunError | str) -> RunError:
        """Stop all turns, and tell peers that wait for this rank."""
        self._broken = RunError(error) if isinstance(error, str) else error
        self._flags.leave()
        return self._broken

    def _all_finished(self, number: int, turn: Turn, *, waiting: bool) -> bool:
        if self._flags.all_finished(number):
            return True
        if waiting:
            self._wait(self._flags.all_finished, self._flags.not_finished, turn, number)
        return waiting

    def _wait(
        self,
        ready: Callable[[int], bool],
        missing: Callable[[int], list[int]],
        turn: Turn,
        number: int,
    ) -> None:
        def left() -> list[int]:
            return self._flags.left(missing(number))

        try:
            self._patience.until(lambda: ready(number), lambda: missing(number), left, turn.what)
        except RunError as error:
            self._break(error)
            raise
