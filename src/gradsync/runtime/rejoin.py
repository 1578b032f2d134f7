"""How a rank that was started again comes back: records between it and the ranks that went on.

    start      the launcher starts a lost rank's process again
    announce   it makes its model as one rank alone, up to `gs.load`, and says where it would load
    admit      after their next checkpoint there, the others agree to take it in (membership.py)
    join       it loads that checkpoint; at the next step it enters the new group

Until it is admitted it can neither hold up the others nor end them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

from gradsync.runtime.peers import process_state
from gradsync.runtime.store import Presence, SignedStore

REJOIN = "GRADSYNC_REJOIN"
"""Variable of a process that was started again, or that comes later: how often, from 1."""
NAMED = "gradsync/named"  # a key of the launchers: how many numbers they have given to ranks
_OVER = "over"


def joined_key(name: int, count: str) -> str:
    """A key that the launcher reads: rank `name`, started again `count` times, has joined."""
    return f"gradsync/joined/{name}/{count}"


def ended_key(host: str, pid: int) -> str:
    """A key for the ranks of other hosts: that process, a rank, has ended."""
    return f"gradsync/ended/{host}/{pid}"


def group_key(node: object) -> str:
    """A key that launchers read: the number of the last group with ranks of host number `node`, as
    the launcher counts; of any host for "last"."""
    return f"gradsync/group/{node}"


@dataclass(frozen=True, slots=True)
class Admission:
    """The place of a new rank in the group that takes it in."""

    generation: int
    """Of the group."""
    step: int
    """Of the checkpoint at which it joins."""
    committed: int
    """Steps that the others have made since they began."""
    names: list[int]
    """The number that the launcher gave to each rank of the group."""
    num_new: int
    """How many of them are new; they are the last."""
    presences: list[Presence]
    """Of each rank of the group."""
    scope: str
    """Of the session's records."""


class Lobby:
    """Records that ranks inside and outside of the group share; equal for all of a session.

    Args:
        records: in the rendezvous store, which outlives every rank.
        num_named: how many numbers the launchers have given to ranks so far.
        has_ended: whether a process has, as it or its launcher said, by its host and id.
    """

    def __init__(
        self,
        records: SignedStore,
        num_named: Callable[[], int],
        has_ended: Callable[[str, int], bool],
    ) -> None:
        self._records, self._num_named, self._has_ended = records, num_named, has_ended

    def announce(self, name: int, presence: Presence, folder: str) -> None:
        """Say that the process of rank `name`, as the launcher counts, was started again, and waits
        for a checkpoint in `folder`."""
        self._records.set(f"again/{name}", json.dumps([folder, asdict(presence)]))

    def waiting(self, inside: Collection[int], folder: str = "") -> dict[int, Presence]:
        """Processes by their rank's number, as the launcher counts, that wait for `folder` or for
        any; not those of numbers that are `inside` of the group."""
        return {
            name: presence
            for name, presence, theirs in self._announced(inside)
            if folder in ("", theirs) and self.admission(presence) is None
        }

    def _announced(self, inside: Collection[int] = ()) -> Iterator[tuple[int, Presence, str]]:
        for name in set(range(self._num_named())).difference(inside):
            if (text := self._records.get(f"again/{name}")) is not None:
                folder, told = json.loads(text)
                if self._may_live(presence := Presence(**told)):
                    yield name, presence, folder

    def _may_live(self, presence: Presence) -> bool:
        here = presence.host == socket.gethostname() and process_state(presence.pid) == "ended"
        return not (here or self._has_ended(presence.host, presence.pid))

    def admit(self, newcomers: Sequence[Presence], admission: Admission) -> None:
        """Tell them their place; every member does, since any of them may die."""
        for presence in newcomers:
            self._records.claim(f"place/{presence.nonce}", json.dumps(asdict(admission)))

    def admission(self, presence: Presence) -> Admission | None:
        """The place of this process in the group, once it is admitted."""
        text = self._records.get(f"place/{presence.nonce}")
        if text is None:
            return None
        told = json.loads(text)
        told["presences"] = [Presence(**each) for each in told["presences"]]
        return Admission(**told)

    def close(self, code: int) -> None:
        """Say that the run has ended with that exit code, so that no rank waits any longer."""
        self._records.set(_OVER, str(code))

    def how_it_ends(self, first: Sequence[Presence]) -> int | None:
        """The exit code for a rank that waits: the run's if it is over, 1 if no rank of it is left,
        None while it goes on.

        Args:
            first: all ranks at the start.
        """
        later = [each for _, each, _ in self._announced()]
        members = (*first, *(each for each in later if self.admission(each) is not None))
        lives = any(map(self._may_live, members))  # before the next line: they say so, then end
        if (code := self._records.get(_OVER)) is not None:
            return int(code)
        return None if lives else 1
