"""Whom a rank waits for: one line once a wait is long, another one when it is over.

    gradsync: waiting for rank 1 for 10 s: it is in data.py:6 __getitem__ (process 4711); ranks 0, 2
    and 3 wait

Every rank that waits looks at what all ranks publish (activity.py), and the lowest of them speaks.
A rank that computes is late, which is no error; one that gives no sign of life is named sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gradsync.runtime.activity import Activity, ask_for_stack

LONG_S = 10.0
"""A wait of this many seconds is reported, then ones of three times as many, and so on."""
_LOOK_S = 1.0
_SILENT_S = 2.0
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank's process."""

    pid: int
    host: str = ""
    """"" for this rank's own host."""
    stack_fd: int = -1
    """See `StackOnSignal`."""


class WaitReport:
    """The lines of one rank.

    Args:
        rank: this one.
        peers: the others.
        state: why a silent process of this host may be silent (`failure.process_state`).
    """

    def __init__(self, rank: int, peers: Mapping[int, Peer], state: Callable[[int], str]) -> None:
        self._rank, self._peers, self._state = rank, peers, state
        self._next_s = LONG_S
        self._looked: tuple[float, dict[int, Activity]] = (0.0, {})
        self._said: tuple[str, float] | None = None
        self._silent: list[int] = []

    def news(self, own: Activity, now: float, read_all: Callable[[], dict[int, Activity]]) -> str:
        """The line to print now; "" for none.

        Args:
            own: this rank's activity.
            now: monotonic clock, seconds.
            read_all: reads what all ranks published last.
        """
        if not own.waits or (self._said is not None and own.since_s < self._said[1]):
            return self._over()
        pause = max(_LOOK_S, len(self._peers) / 64)  # all waiting ranks ask one store
        if own.since_s < _SILENT_S or now - self._looked[0] < pause:
            return ""
        before, found = self._looked[1], read_all() | {self._rank: own}
        self._looked = (now, found)
        silent = [
            rank
            for rank in self._peers
            if rank in before and rank in found and before[rank].beat == found[rank].beat
        ]
        new = [rank for rank in silent if rank not in self._silent]
        self._silent = silent
        if not new and own.since_s < self._next_s:
            return ""
        while self._next_s <= own.since_s:
            self._next_s *= 3
        waiting = [rank for rank, each in sorted(found.items()) if each.waits]
        waiting = [rank for rank in waiting if rank not in silent]
        if waiting[0] != self._rank:
            return ""
        awaited, text = self.explain(own, found, silent)
        self._said = (awaited, own.since_s)
        return text

    def explain(
        self, own: Activity, found: Mapping[int, Activity], silent: Sequence[int]
    ) -> tuple[str, str]:
        """Who is waited for, and the line that says so.

        Args:
            own: this rank's activity.
            found: every rank's.
            silent: ranks whose heartbeat stands still.
        """
        waiting = [rank for rank in sorted(found) if found[rank].waits and rank not in silent]
        late = [rank for rank in sorted(found) if rank not in waiting]
        if not late:
            places = group(waiting, [found[rank].where for rank in waiting])
            where = "; ".join(f"{names(ranks)} in {place}" for place, ranks in places.items())
            return "", f"all ranks have waited for each other for {own.since_s:.0f} s: {where}"
        awaited, said = names(late), self.places({rank: found[rank] for rank in late}, silent)
        return awaited, (
            f"waiting for {awaited} for {own.since_s:.0f} s: {said}; "
            f"{names(waiting)} wait{'s' if len(waiting) == 1 else ''} in {own.where}"
        )

    def places(self, late: Mapping[int, Activity], silent: Collection[int] = ()) -> str:
        """Where the `late` ranks are; the `silent` ones among them give no sign of life."""
        some = list(late.items())[:_MOST_NAMED]
        said = [self._place(rank, activity, rank in silent) for rank, activity in some]
        more = len(late) - len(some)
        return "; ".join(said) + (f"; and {more} more" if more else "")

    def _place(self, rank: int, activity: Activity, silent: bool) -> str:
        peer = self._peers[rank]
        where = activity.where
        if silent and not peer.host:
            state = self._state(peer.pid)
            if "lock" in state and (seen := ask_for_stack(peer.pid, peer.stack_fd)):
                where = seen
            doing = f"gives no sign of life ({state})" + (
                f", last seen in {where}" if where else ""
            )
        elif silent:
            doing = "gives no sign of life" + (f", last seen in {where}" if where else "")
        else:
            doing = f"is in {where or 'an unknown place'}"
        on = f" on {peer.host}" if peer.host else ""
        return f"rank {rank} (process {peer.pid}{on}) {doing}"

    def _over(self) -> str:
        said, self._said = self._said, None
        self._next_s, self._silent = LONG_S, []
        self._looked = (0.0, {})
        if said is None:
            return ""
        return f"{said[0] or 'all ranks'} went on, after at least {said[1]:.0f} s"


def group(ranks: Sequence[int], keys: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each key, keys in the order in which they first come."""
    found: dict[str, list[int]] = {}
    for rank, key in zip(ranks, keys, strict=True):
        found.setdefault(key, []).append(rank)
    return found


def names(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`, or the first eight and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_NAMED:
        return (
            f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))} and {len(ranks) - _MOST_NAMED} more"
        )
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
