"""Go on without a lost rank: survivors agree, form a new group, and finish or repeat the step.

    a connection ends      -> every survivor ends its own, so that all of them notice
    report, propose        -> through the rendezvous store (membership.py)
    new group              -> over the members of the first proposal, with ranks numbered anew
    the step               -> finished with the sums that all hold, or begun again

The store must outlive the lost rank: `gradsync launch` serves it. A rank that raises an exception
is not lost: its error ends the run, as without this.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from gradsync.errors import PeerError
from gradsync.runtime.failure import communication_error, symptom
from gradsync.runtime.membership import Move, Report, finishes, next_move
from gradsync.runtime.peers import process_state
from gradsync.runtime.store import record_of, wait_until
from gradsync.runtime.watch import REPORT_S

if TYPE_CHECKING:
    from gradsync.runtime.store import SignedStore
    from gradsync.runtime.watch import FailureWatch
    from gradsync.world import World

log = logging.getLogger("gradsync")

_LOOK_S = 0.02


class Group(Protocol):
    """What a `Session` does for its recovery."""

    @property
    def world(self) -> World:
        """The ranks; the same object after a loss, with new numbers."""
        ...

    def suspend(self, number: int) -> tuple[FailureWatch, SignedStore]:
        """Stop watching, and end all connections, so that the other ranks notice; returns the watch
        and the records of the `number`-th ballot."""
        ...

    def regroup(self, number: int, members: Sequence[int]) -> None:
        """Go on in a group of `members`, ranks of the last one, numbered anew.

        Raises:
            RuntimeError: one of them is lost, too.
        """
        ...


class Handle(Protocol):
    """What synchronises a model."""

    number: int
    """The same on all ranks."""

    @property
    def in_step(self) -> bool:
        """Whether there are gradients that no step has used."""
        ...

    def regroup(self) -> None:
        """Continue among the ranks that are left."""
        ...


class Recovery:
    """Recovers a session of `gs.init(on_loss="shrink")` from lost ranks.

    Args:
        group: the session, open.
        silence_s: after which a silent host counts as lost.
        timeout_s: longest wait for the other survivors.
    """

    def __init__(self, group: Group, *, silence_s: float, timeout_s: float) -> None:
        self._group, self._silence_s, self._timeout_s = group, silence_s, timeout_s
        self.generation = 0
        """Groups so far, after the first one."""
        self.committed = 0
        """Steps whose update all ranks make."""
        self.lost = self.abandoned = False
        """Whether a rank is lost, and whether a wait for it was given up."""
        self.in_attempt = False
        """Whether a step may be begun again, see `sync.attempts`."""
        self.recovered = 0
        """The last of them that this rank has joined."""
        self.handles: WeakSet[Handle] = WeakSet()
        """Everything that synchronises a model."""
        self._stale = False
        self._names: list[int] = []  # the members' first ranks
        self._processes: Mapping[int, int] = {}  # process ids of the last group's other members

    def is_lost(self) -> bool:
        """Whether a rank is lost; the caller then gives up waiting."""
        self.abandoned = self.abandoned or self.lost
        return self.lost

    def commit(self, barrier: Callable[[], None]) -> None:
        """Return once every rank holds the step's whole sums, so that all make the update. One
        `barrier` of the whole group; if it fails, survivors decide: see [Note: Commit].

        Raises:
            RuntimeError: the barrier's own error: the step must begin again, or the run must end.
        """
        try:
            barrier()
        except RuntimeError as error:
            recovers = self.in_attempt and communication_error(error) is not None
            if not recovers or not self.recover(error, holds_sums=True):
                raise
        self.committed += 1

    def rebind(self, *, again: bool = False) -> None:
        """Make the handles continue in the new group, if there is one. With `again`, a rank that is
        lost meanwhile is recovered from, too."""
        while self._stale:
            try:
                for handle in sorted(self.handles, key=lambda each: each.number):
                    handle.regroup()  # its messages go in one order on all ranks
            except RuntimeError as error:
                if not again or communication_error(error) is None:
                    raise
                self.recover(error)
            else:
                self._stale = False

    def recover(self, error: BaseException, *, holds_sums: bool = False) -> bool:
        """Form a group without the lost ranks; returns whether this rank finishes the step.

        Args:
            error: what a collective raised.
            holds_sums: whether this rank holds the whole sums of the step.

        Raises:
            PeerError: another rank's own failure ends the run, or the store is gone.
            RuntimeError: `error`, if no rank is lost, or one neither comes nor ends in time.
        """
        group, began = self._group, time.monotonic()
        finish = False
        if not self._names:
            self._names = list(range(group.world.world_size))
        while True:
            self.generation += 1
            world, lost = group.world, set(range(group.world.world_size))
            chosen = self._agree(Report(self.committed, holds_sums), error)
            finish = finishes(world.rank, chosen)
            holds_sums = finish
            lost -= chosen.keys()
            if not lost:
                raise error
            if world.rank == min(chosen):
                self._end(lost)
                self._tell(sorted(lost), len(chosen), error, began, finish=finish)
            self._names = [self._names[rank] for rank in sorted(chosen)]
            try:
                group.regroup(self.generation, sorted(chosen))
                break
            except RuntimeError as again:
                if communication_error(again) is None:
                    raise
                error = again  # one more was lost meanwhile
        self._stale, self.recovered = True, self.generation
        log.info("rank %d goes on after %.2f s", world.rank, time.monotonic() - began)
        return finish

    def _agree(self, mine: Report, error: BaseException) -> Mapping[int, Report]:
        """The new members, with their reports, by their rank in the group that has ended."""
        from torch.distributed import DistError

        watch, records = self._group.suspend(self.generation)
        rank, peers = self._group.world.rank, watch.peers
        self._processes = peers.pids
        members, began, told = range(peers.world_size), time.monotonic(), False
        try:
            records.set(f"report/{rank}", record_of(mine))
            while True:
                if failure := watch.peer_failure():
                    raise failure from error
                texts = {each: records.get(f"report/{each}") for each in members}
                found = {
                    each: Report(**json.loads(text))
                    for each, text in texts.items()
                    if text is not None
                }
                missing = [each for each in members if each not in found]
                left = set(missing).intersection(peers.left() if missing else ())
                if left and not mine.holds_sums:
                    raise error  # it does not take part in this step, and is not lost
                # Whoever has left in good order while others hold a step's sums has committed it.
                dead = left | peers.lost(missing, self._silence_s)
                text = records.get("members")
                chosen = None if text is None else _members(text)
                match next_move(rank, members, found, dead, chosen):
                    case Move.PROPOSE:
                        proposal = {each: asdict(report) for each, report in found.items()}
                        records.claim("members", json.dumps(proposal))
                    case Move.JOIN:
                        return chosen or {}
                    case Move.LEAVE:
                        _say(
                            f"rank {rank}: the others took this rank for dead and went on: it ends"
                        )
                        os.kill(os.getpid(), signal.SIGKILL)  # as a lost rank, for the launcher
                    case Move.WAIT:
                        waited_s = time.monotonic() - began
                        if waited_s > self._timeout_s:
                            raise error
                        if waited_s > REPORT_S and not told:
                            told = True
                            _say(f"rank {rank} waits for {missing} to abandon the step")
                        time.sleep(_LOOK_S)
        except DistError as gone:
            raise PeerError(peers.server_obituary(gone)) from error

    def _end(self, lost: set[int]) -> None:
        """Kill lost ranks of this host that are only stopped: they hold files and locks."""
        for pid in (self._processes[rank] for rank in lost if rank in self._processes):
            if process_state(pid) != "ended":
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: process_state(pid) == "ended", time.monotonic() + 5)

    def _tell(
        self,
        lost: list[int],
        num_left: int,
        error: BaseException,
        began: float,
        *,
        finish: bool,
    ) -> None:
        words = "finish" if finish else "repeat"
        names = ", ".join(str(self._names[rank]) for rank in lost)
        said = symptom(communication_error(error) or error)
        _say(
            f"lost rank(s) {names} in step {self.committed + 1} ({said}); {num_left} rank(s) "
            f"{words} it, agreed after {time.monotonic() - began:.2f} s"
        )


def _say(line: str) -> None:
    print(f"gradsync: {line}", file=sys.stderr, flush=True)


def _members(text: bytes) -> dict[int, Report]:
    return {int(rank): Report(**report) for rank, report in json.loads(text).items()}
