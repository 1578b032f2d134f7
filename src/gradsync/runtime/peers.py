"""The other ranks of a run: their processes, what they wrote into the store, how they ended."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.runtime.activity import Activity, read_activity
from gradsync.runtime.store import LEFT, Presence


class Peers:
    """The ranks other than `rank`.

    Args:
        store: of the rendezvous.
        processes: of those ranks, as far as they are known.
        hosts: host name of each rank, if they sit on several.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        processes: Mapping[int, Presence] | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self._store, self.rank, self.hosts = store, rank, hosts
        self._others = [other for other in range(world_size) if other != rank]
        self.processes = processes or {}
        here = socket.gethostname()
        self.pids = {other: it.pid for other, it in self.processes.items() if it.host == here}
        """Of the ranks on this host."""

    def beats(self) -> dict[int, bytes]:
        """The last heartbeats; b"" for none yet."""
        keys = {rank: f"beat/{rank}" for rank in self._others}
        return {
            rank: self._store.get(key) if self._store.check([key]) else b""
            for rank, key in keys.items()
        }

    def activities(self) -> dict[int, Activity]:
        """What they published last."""
        return {rank: read_activity(beat) for rank, beat in self.beats().items()}

    def has_noticed(self, rank: int) -> bool:
        """Whether it has noticed a failure, or leaves: then its heartbeats end."""
        return self._store.check([f"noticed/{rank}"])

    def left(self) -> list[int]:
        """Ranks that have left in good order."""
        return list(filter(self.has_left, self._others))

    def has_left(self, rank: int) -> bool:
        """Whether it has left in good order."""
        return self.has_noticed(rank) and self._store.get(f"noticed/{rank}") == LEFT

    def ended(self) -> list[int]:
        """Ranks of this host whose process has ended, and that did not say why."""
        gone = (rank for rank, pid in self.pids.items() if process_state(pid) == "ended")
        return [rank for rank in gone if not self.has_noticed(rank)]

    def silent_since(self, before: Mapping[int, bytes]) -> list[int]:
        """Ranks whose heartbeat has stood still since then, and that did not say why."""
        still = (rank for rank, beat in self.beats().items() if beat == before[rank])
        return [rank for rank in still if not self.has_noticed(rank)]

    def obituary(self, silent: Sequence[int]) -> str:
        """A line about ranks that are silent."""
        alive = {rank: process_state(pid) for rank, pid in self.pids.items() if rank in silent}
        states = dict.fromkeys(silent, "ended") | alive
        ended = [rank for rank, state in states.items() if state == "ended"]
        said = []
        if ended:
            where, why = "", "or the host died"
            if self.hosts:
                where = " on " + ", ".join(dict.fromkeys(self.hosts[rank] for rank in ended))
                why = "the host died, or the network to it is broken"
            who = ", ".join(map(str, ended))
            said.append(
                f"rank(s) {who}{where} vanished without a word (killed, out of memory, {why})"
            )
        # Two hosts may have one name: then a process of that number is here by chance.
        more = ", or the network to it is broken" if self.hosts else ""
        said += [
            f"rank {rank} (process {self.pids[rank]}) gives no sign of life ({state}{more})"
            for rank, state in states.items()
            if state != "ended"
        ]
        return "; ".join(said)


def process_state(pid: int) -> str:
    """Why a silent process of this host may be silent; "ended" when there is none."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "ended"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "it is stopped, by a signal or a debugger"
    ended = status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return "ended" if ended else "something holds Python's lock, or the machine swaps"
