"""Report the ranks that a rank waits for: one line once a wait is long, one when it is over.

    gradsync: waiting for rank 1 for 10 s: rank 1 (process 4711) is in data.py:6 __getitem__; ranks
    0, 2 and 3 wait in train.py:40 <module> (GradientSync.step)

Every waiting rank reads what all ranks publish (activity.py); the lowest of them prints. A rank
that computes is late, which is no error. A rank whose heartbeat stops is named sooner, unless it is
runnable and other programs use the processors of its host. After long waits that ended well, the
next line comes after three times as long: a slow network, or an evaluation by one rank, is reported
once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gradsync.runtime.activity import Activity
from gradsync.runtime.peers import Peers, process_state, processor_s

_FACTOR = 3
_LOOK_S = 1.0
_SILENT_S = 1.5
_QUEUED, _RAN = 0.5, 0.1
"""Shares of the time between two looks: a rank that is queued for more, and runs for less, is
starved. A rank that holds the GIL runs for more."""
_MOST_NAMED = 8


class WaitReport:
    """The lines of one rank.

    Args:
        peers: the other ranks.
        report_s: report waits longer than this, then ones three times as long, and so on.
    """

    def __init__(self, peers: Peers, *, report_s: float) -> None:
        self._rank, self._peers, self.report_s = peers.rank, peers, report_s
        self.stuck: dict[int, Activity] = {}
        """Ranks that this one has waited for longer than usual at this place, unless they are
        excused (`Activity.excused`)."""
        self.silent: list[int] = []
        """Ranks whose heartbeat stands still without a record of the reason."""
        self._longest: dict[str, float] = {}
        """By place, the longest wait that ended well."""
        self._excused_s = 0.0  # of the current wait, up to the last look that found it excused
        self._wait: Activity | None = None
        self._next_s = 0.0
        self._looked: tuple[float, dict[int, Activity], dict[int, tuple[float, float]]]
        self._looked = (0.0, {}, {})
        """The last look: time, activities, and the `processor_s` of ranks of this host."""
        self._said: tuple[str, float] | None = None

    def news(self, own: Activity, now: float, read_all: Callable[[], dict[int, Activity]]) -> str:
        """The line to print now; "" for none.

        Args:
            own: this rank's activity.
            now: monotonic clock, seconds.
            read_all: reads the latest activity of all ranks.
        """
        before, may_wait = self._wait, own.waits or own.idle
        over = before is not None and not (may_wait and own.since_s >= before.since_s)
        said = self._over() if over else ""
        self._wait = own if may_wait else None
        pause = max(_LOOK_S, len(self._peers.processes) / 64)  # all waiting ranks query one store
        if said or own.since_s < min(_SILENT_S, self.report_s) or now - self._looked[0] < pause:
            return said
        return self._look(own, now, read_all() | {self._rank: own}) if may_wait else ""

    def _look(self, own: Activity, now: float, found: dict[int, Activity]) -> str:
        used = {rank: processor_s(pid) for rank, pid in self._peers.pids.items()}
        (then, before, had_used), self._looked = self._looked, (now, found, used)
        if not before:
            return ""  # it takes two looks to see which ones are silent
        still = [rank for rank in self._peers.processes if before[rank].beat == found[rank].beat]
        starved, passed = set(), now - then
        for rank, each in used.items():
            ran, queued = (new - old for new, old in zip(each, had_used[rank], strict=True))
            if queued > _QUEUED * passed and ran < _RAN * passed:
                starved.add(rank)
        silent = [r for r in still if r not in starved and self._peers.noticed(r) is None]
        new, self.silent = [rank for rank in silent if rank not in self.silent], silent
        waiting = waiting_ranks(found, silent)
        long_s = max(self.report_s, _FACTOR * self._longest.get(own.where, 0.0))
        late = {rank: each for rank, each in sorted(found.items()) if rank not in waiting}
        unexcused = {r: each for r, each in late.items() if not each.excused or r in silent}
        waits = self._rank in waiting
        if not late and {(x.issued, x.excused) for x in found.values()} == {(own.issued, False)}:
            others = {rank: each for rank, each in found.items() if rank != self._rank}
            unexcused = others if {x.where for x in others.values()} != {own.where} else {}
        if excused := bool(late) and not unexcused:
            self._excused_s = own.since_s
        waited_s = own.since_s - self._excused_s
        self.stuck = unexcused if waits and waited_s >= long_s else {}
        if not waits or excused or (not new and waited_s < max(long_s, self._next_s)):
            return ""
        self._next_s = _FACTOR * waited_s if waited_s >= long_s else 0.0
        if waiting[0] != self._rank or any(self._peers.noticed(r) is not None for r in late):
            return ""
        self._said = (names(list(late)) if late else "all ranks", waited_s)
        if not late:
            return f"all ranks have waited for {waited_s:.0f} s, {self.all_places(found)}"
        return (
            f"waiting for {self._said[0]} for {waited_s:.0f} s: {self.places(late)}; "
            f"{names(waiting)} wait{'s' if len(waiting) == 1 else ''} in {own.where}"
        )

    def lateness(self, own: Activity) -> str:
        """The ranks that this one waited for until its timeout, with activity `own`."""
        if left := self._peers.left():
            return f"rank(s) {', '.join(map(str, left))} had left in good order"
        found = self._peers.everyone() | {self._rank: own}
        told = f"rank {self._rank} waited as long as it may (timeout_s)"
        waiting = {self._rank, *waiting_ranks(found)}
        others = {rank: each for rank, each in sorted(found.items()) if rank not in waiting}
        # A rank that also timed out is no longer in its collective.
        late = {r: each for r, each in others.items() if self._peers.noticed(r) is None}
        if not late:
            return f"{told}; all ranks wait, {self.all_places(found)}"
        return f"{told} in {own.where}; {self.places(late)}"

    def all_places(self, found: Mapping[int, Activity]) -> str:
        """Places of ranks that all wait for each other, and the likely cause."""
        places: dict[str, list[int]] = {}
        for rank, each in sorted(found.items()):
            places.setdefault(each.where, []).append(rank)
        if len(places) == 1:
            return f"in {next(iter(places))}: the network is slow, or stands"
        all_said = (f"{names(some)} in {place}" for place, some in places.items())
        return f"in different calls: {'; '.join(all_said)}"

    def places(self, late: Mapping[int, Activity]) -> str:
        """Places of the `late` ranks; silent ones are marked."""
        said = [self._place(rank, each) for rank, each in late.items()]
        more = [f"and {len(said) - _MOST_NAMED} more"] if len(said) > _MOST_NAMED else []
        return "; ".join(said[:_MOST_NAMED] + more)

    def _place(self, rank: int, activity: Activity) -> str:
        process, where = self._peers.processes[rank], activity.where
        is_here = rank in self._peers.pids
        who = f"rank {rank} (process {process.pid}{'' if is_here else f' on {process.host}'})"
        if rank not in self.silent:
            return f"{who} is in {where or 'an unknown place'}"
        state = process_state(process.pid) if is_here else ""
        why = " (its process has ended)" if state == "ended" else f" ({state})" if state else ""
        return f"{who} gives no sign of life{why}" + (f", last seen in {where}" if where else "")

    def _over(self) -> str:
        wait, said = self._wait, self._said
        if wait:
            # A one-minute checkpoint does not make a minute usual for reading data.
            waited_s = wait.since_s - self._excused_s
            self._longest[wait.where] = max(waited_s, self._longest.get(wait.where, 0.0))
        self._said, self._next_s, self._looked = None, 0.0, (0.0, {}, {})
        self.stuck, self.silent, self._excused_s = {}, [], 0.0
        return f"{said[0]} went on, after at least {said[1]:.0f} s" if said else ""


def waiting_ranks(found: Mapping[int, Activity], silent: Collection[int] = ()) -> list[int]:
    """The ranks that wait for others: their stack shows it, or they are idle although they have
    begun more collectives than another rank."""
    fewest = min((each.issued for each in found.values()), default=0)
    return [
        rank
        for rank, each in sorted(found.items())
        if rank not in silent and (each.waits or (each.idle and each.issued > fewest))
    ]


def names(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`, or the first eight and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    some = ranks[: _MOST_NAMED if len(ranks) > _MOST_NAMED else -1]
    last = f"{len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else str(ranks[-1])
    return f"ranks {', '.join(map(str, some))} and {last}"
