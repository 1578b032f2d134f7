"""Who goes on after a rank is lost, and with which step: decisions only, no clock and no sockets.

Each loss begins a new *generation* of the group. Survivors agree on it through the rendezvous
store, which one process serves, so that the first of several proposals wins:

    report     every survivor publishes once: the steps it has committed, and whether it holds the
               whole sums of the next one
    propose    a survivor for which every other member has reported or is dead proposes the members
               that have reported, with their reports, and whoever waits to join, see `admits`
    follow     the first proposal is the new group; a rank that is not in it leaves the run

[Note: Commit] A rank updates its weights in step k+1 only after a barrier that every rank enters
with the whole sums of step k+1. So if one survivor has committed that step, all others hold its
sums, and finish it. If all survivors hold its sums, they finish it too. Otherwise none has
committed it, and they do it again. No rank that is left out can commit a step that the others do
again, unless it passed the barrier before: then its weights are those that the others get, since a
step does not depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Report:
    """What a survivor knows when it abandons a step."""

    committed: int
    """Steps whose update it has made."""
    holds_sums: bool
    """Whether it holds the whole sums of the step after them."""
    evaluates: bool = False
    """Whether it has done that step, an evaluation without sums: a lost rank's share is missing."""
    saved: int | None = None
    """The step of the checkpoint on disk at which it lets others join; None between checkpoints."""


class Move(Enum):
    """What a survivor does next."""

    WAIT = auto()  # for a report, a death or a proposal
    PROPOSE = auto()  # the members that have reported
    JOIN = auto()  # the group of the first proposal
    LEAVE = auto()  # the others have gone on without this rank


def next_move(
    rank: int,
    members: Collection[int],
    reported: Collection[int],
    dead: Collection[int],
    chosen: Collection[int] | None,
) -> Move:
    """The next move of `rank`, one of the last generation's `members`, after it has reported.

    Args:
        reported: members whose report is in the store.
        dead: members that have ended, or are silent.
        chosen: the first proposal, if there is one.
    """
    if chosen is not None:
        return Move.JOIN if rank in chosen else Move.LEAVE
    missing = set(members) - set(reported) - set(dead)
    return Move.WAIT if missing or rank not in reported else Move.PROPOSE


def finishes(rank: int, chosen: Mapping[int, Report]) -> bool:
    """Whether `rank` finishes the step that it has abandoned, with the sums it holds; otherwise it
    begins it again. See [Note: Commit]."""
    most = max(report.committed for report in chosen.values())
    mine = chosen[rank]
    if mine.committed == most:
        ready = (r.holds_sums and not r.evaluates for r in chosen.values())
        return all(ready) and all(r.committed == most for r in chosen.values())
    assert (mine.committed, mine.holds_sums) == (most - 1, True), (rank, chosen)
    return True


def admits(reports: Collection[Report]) -> bool:
    """Whether ranks that were started again may join the group: every member has stopped at one
    checkpoint, which has all that they need."""
    steps = {report.saved for report in reports}
    return len(steps) == 1 and None not in steps
