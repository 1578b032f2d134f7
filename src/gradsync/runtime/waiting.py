"""Whom a rank waits for: one line once a wait is long, another one when it is over.

    gradsync: waiting for rank 1 for 10 s: rank 1 (process 4711) is in data.py:6 __getitem__; ranks
    0, 2 and 3 wait in train.py:40 <module> (GradientSync.step)

Every rank that waits looks at what all ranks publish (activity.py), and the lowest of them speaks.
A rank that computes is late, which is no error; one that gives no sign of life is named sooner.
Where waits have been long before and ended well, a line comes only after three times as long: a
slow network, or an evaluation by one rank, is told of once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gradsync.runtime.activity import Activity, ask_for_stack

_FACTOR = 3
_LOOK_S = 1.0
_SILENT_S = 2.0
_MOST_NAMED = 8
_MOST_PLACES = 256


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
        report_s: waits of so many seconds are reported, then ones three times as long, and so on.
        state: why a silent process of this host may be silent (`failure.process_state`).
        has_noticed: whether a rank has said that it noticed a failure, or that it leaves.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        *,
        report_s: float,
        state: Callable[[int], str],
        has_noticed: Callable[[int], bool],
    ) -> None:
        self._rank, self._peers, self._report_s = rank, peers, report_s
        self._state, self._has_noticed = state, has_noticed
        self.stuck: dict[int, Activity] = {}
        """Ranks that this one has waited for longer than it usually does here, and that do not
        write a checkpoint."""
        self.silent: list[int] = []
        """Ranks whose heartbeat stands still, and that did not say why."""
        self._longest: dict[str, float] = {}
        """By place, the longest wait that ended well."""
        self._wait: Activity | None = None
        self._next_s = 0.0
        self._looked: tuple[float, dict[int, Activity]] = (0.0, {})
        self._said: tuple[str, float] | None = None

    def news(self, own: Activity, now: float, read_all: Callable[[], dict[int, Activity]]) -> str:
        """The line to print now; "" for none.

        Args:
            own: this rank's activity.
            now: monotonic clock, seconds.
            read_all: reads what all ranks published last.
        """
        before, may_wait = self._wait, own.waits or own.idle
        over = before is not None and not (may_wait and own.since_s >= before.since_s)
        said = self._over() if over else ""
        self._wait = own if may_wait else None
        pause = max(_LOOK_S, len(self._peers) / 64)  # all waiting ranks ask one store
        if said or own.since_s < min(_SILENT_S, self._report_s) or now - self._looked[0] < pause:
            return said
        return self._look(own, now, read_all() | {self._rank: own}) if may_wait else ""

    def _look(self, own: Activity, now: float, found: dict[int, Activity]) -> str:
        (_, before), self._looked = self._looked, (now, found)
        silent = [
            rank
            for rank in self._peers
            if rank in before and rank in found and before[rank].beat == found[rank].beat
        ]
        silent = [rank for rank in silent if not self._has_noticed(rank)]
        new, self.silent = [rank for rank in silent if rank not in self.silent], silent
        waiting = waiting_ranks(found, silent)
        if self._rank not in waiting:
            return ""
        long_s = max(self._report_s, _FACTOR * self._longest.get(own.where, 0.0))
        late = {rank: each for rank, each in sorted(found.items()) if rank not in waiting}
        self.stuck = {
            rank: each
            for rank, each in late.items()
            if own.since_s >= long_s and not (each.saves and rank not in silent)
        }
        if not new and own.since_s < max(long_s, self._next_s):
            return ""
        self._next_s = _FACTOR * own.since_s if own.since_s >= long_s else 0.0
        if waiting[0] != self._rank or any(map(self._has_noticed, late)):
            return ""
        awaited, text = self.explain(own, found, late)
        self._said = (awaited, own.since_s)
        return text

    def explain(
        self, own: Activity, found: Mapping[int, Activity], late: Mapping[int, Activity]
    ) -> tuple[str, str]:
        """Who is waited for, and the line that says so.

        Args:
            own: this rank's activity.
            found: every rank's.
            late: those of the ranks that do not wait.
        """
        if not late:
            said = f"all ranks have waited for {own.since_s:.0f} s, {self.all_places(found)}"
            return "all ranks", said
        awaited, waiting = names(list(late)), [rank for rank in sorted(found) if rank not in late]
        return awaited, (
            f"waiting for {awaited} for {own.since_s:.0f} s: {self.places(late)}; "
            f"{names(waiting)} wait{'s' if len(waiting) == 1 else ''} in {own.where}"
        )

    def all_places(self, found: Mapping[int, Activity]) -> str:
        """Where ranks are that all wait for each other, and what that means."""
        ranks = sorted(found)
        places = group(ranks, [found[rank].where for rank in ranks])
        if len(places) == 1:
            return f"in {next(iter(places))}: the network is slow, or stands"
        said = "; ".join(f"{names(some)} in {place}" for place, some in places.items())
        return f"in different calls: {said}"

    def places(self, late: Mapping[int, Activity]) -> str:
        """Where the `late` ranks are; the silent ones among them give no sign of life."""
        said = [self._place(rank, each) for rank, each in list(late.items())[:_MOST_NAMED]]
        more = len(late) - len(said)
        return "; ".join(said) + (f"; and {more} more" if more else "")

    def _place(self, rank: int, activity: Activity) -> str:
        peer, where = self._peers[rank], activity.where
        who = f"rank {rank} (process {peer.pid}{f' on {peer.host}' if peer.host else ''})"
        if rank not in self.silent:
            return f"{who} is in {where or 'an unknown place'}"
        why = ""
        if not peer.host:
            state = self._state(peer.pid)
            if "lock" in state and (seen := ask_for_stack(peer.pid, peer.stack_fd)):
                where = seen
            why = f" ({state})"
        return f"{who} gives no sign of life{why}" + (f", last seen in {where}" if where else "")

    def _over(self) -> str:
        wait, said = self._wait, self._said
        if wait is not None and (wait.where in self._longest or len(self._longest) < _MOST_PLACES):
            self._longest[wait.where] = max(wait.since_s, self._longest.get(wait.where, 0.0))
        self._said, self._next_s, self._looked = None, 0.0, (0.0, {})
        self.stuck, self.silent = {}, []
        return f"{said[0]} went on, after at least {said[1]:.0f} s" if said else ""


def waiting_ranks(found: Mapping[int, Activity], silent: Collection[int] = ()) -> list[int]:
    """The ranks that wait for others: their stack says so, or they are idle though they have begun
    more collectives than another rank."""
    fewest = min((each.issued for each in found.values()), default=0)
    return [
        rank
        for rank, each in sorted(found.items())
        if rank not in silent and (each.waits or (each.idle and each.issued > fewest))
    ]


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
