"""The other ranks of a run: their processes, their records in the store, how they ended."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gradsync.runtime.activity import Activity, read_activity
from gradsync.runtime.network import PeerConnections
from gradsync.runtime.store import (
    HEARD,
    LEFT,
    SETTLED,
    Presence,
    SignedStore,
    record_of,
    wait_until,
)

_STILL_CALLS = 3
RUNS = "something holds Python's lock, or the machine swaps"
"""Why a process that is neither stopped nor dead may be silent."""


class Peers:
    """The ranks other than `rank`.

    Args:
        store: records of the rendezvous.
        hosted_by_agent: the launcher serves the store, not rank 0.
        processes: the known processes of those ranks.
        hosts: host name of each rank, if they sit on several.
        connections: to those ranks; `Peers` maintains them from now on.
        all_here: whether all of them run, or have run, on this host.
        has_ended: whether a process has, as the launcher on its host says.
    """

    def __init__(
        self,
        store: SignedStore,
        *,
        rank: int,
        world_size: int,
        hosted_by_agent: bool = False,
        processes: Mapping[int, Presence] | None = None,
        hosts: Sequence[str] = (),
        connections: PeerConnections | None = None,
        all_here: bool = False,
        has_ended: Callable[[str, int], bool] = lambda _host, _pid: False,
    ) -> None:
        self._store, self.rank, self.world_size, self.hosts = store, rank, world_size, hosts
        self.hosted_by_agent = hosted_by_agent
        self._connections, self._has_ended = connections, has_ended
        self._last_look: dict[int, bytes] = {}
        self._others = [other for other in range(world_size) if other != rank]
        self.processes = processes or {}
        here = socket.gethostname()
        self.pids = {other: it.pid for other, it in self.processes.items() if it.host == here}
        """Process ids of the ranks on this host."""
        # Another host may have this one's name: a process never seen here cannot end here.
        self._seen = {
            rank for rank, pid in self.pids.items() if all_here or process_state(pid) != "ended"
        }
        self._ended: dict[int, tuple[bytes, int]] = {}
        self._beats_seen: dict[int, tuple[bytes, float]] = {}

    # -- what they publish ------------------------------------------------------------------------

    def beats(self) -> dict[int, bytes]:
        """The last heartbeats; b"" for none yet."""
        return {rank: self._store.get(f"beat/{rank}") or b"" for rank in self._others}

    def everyone(self) -> dict[int, Activity]:
        """Every rank's activity, including this one's; torch's error if the store is gone."""
        ranks = range(self.world_size)
        return {rank: read_activity(self._store.get(f"beat/{rank}") or b"") for rank in ranks}

    def noticed(self, rank: int) -> bytes | None:
        """What it has noticed of a failure, or that it leaves; None for neither."""
        return self._store.get(f"noticed/{rank}")

    def left(self) -> list[int]:
        """Ranks that have left in good order."""
        return [rank for rank in self._others if self.noticed(rank) == LEFT]

    def without(self, *words: bytes) -> list[int]:
        """Ranks whose record of what they notice is none of `words`."""
        return [rank for rank in self._others if self.noticed(rank) not in words]

    # -- what this rank publishes -----------------------------------------------------------------

    def notice(self, what: bytes) -> None:
        """Publish what this rank has noticed."""
        self._store.set(f"noticed/{self.rank}", what)

    @contextmanager
    def told_of_life(self, last: Activity, interval_s: float) -> Generator[None]:
        """Continue heartbeats after the `last` one while the main thread looks for a cause: a live
        rank is no culprit; one that noticed something before it died or was cut off is."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # without a store nothing reads
                for number in itertools.count(last.beat + 1):
                    self._store.set(f"beat/{self.rank}", record_of(replace(last, beat=number)))
                    if over.wait(interval_s):
                        return

        thread = threading.Thread(target=beat, name="gradsync-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def settle(self, num_silent: int, deadline_s: float) -> None:
        """Publish that this rank knows which ranks are silent. If rank 0 serves the store, it stays
        until the others know it too."""
        self.notice(SETTLED)
        if self.rank == 0:
            wait_until(lambda: len(self.without(SETTLED, HEARD)) <= num_silent, deadline_s)

    # -- who is dead or silent --------------------------------------------------------------------

    def ended(self) -> list[int]:
        """Ranks of this host whose process has ended without a record of the reason."""
        gone = (rank for rank, pid in self.pids.items() if process_state(pid) == "ended")
        return [rank for rank in gone if self.noticed(rank) is None]

    def dead(self) -> list[int]:
        """Ranks of this host whose process has ended without a record, and whose heartbeat stood
        still in the last three calls. On another host with this name, the heartbeat goes on."""
        ended = self._seen.intersection(self.ended())
        beats = self.beats() if ended else {}
        before, self._ended = self._ended, {}
        for rank in ended:
            beat, calls = before.get(rank, (b"", 0))
            self._ended[rank] = (beats[rank], calls + 1 if beats[rank] == beat else 1)
        return sorted(rank for rank, (_, calls) in self._ended.items() if calls >= _STILL_CALLS)

    def lost(self, missing: Sequence[int], silence_s: float) -> set[int]:
        """Those of `missing` that have ended, or whose heartbeat has stood still for
        `silence_s` since the first call; not a process of this host that is merely slow."""
        now, beats = time.monotonic(), self.beats() if missing else {}
        found = set()
        for rank in missing:
            beat, since = self._beats_seen.get(rank, (b"", now))
            if beats[rank] != beat:
                since = now
            self._beats_seen[rank] = (beats[rank], since)
            state = process_state(self.pids[rank]) if rank in self._seen else ""
            it = self.processes.get(rank)
            if not state and it is not None and self._has_ended(it.host, it.pid):
                state = "ended"
            if state == "ended" or (state != RUNS and now - since > silence_s):
                found.add(rank)
        return found

    def cut_off(self) -> list[int]:
        """Ranks whose connection has ended and whose heartbeat stood still since the last call.
        Gloo does not always wake a rank whose connection ends. Ranks that leave in good order, or
        end because they know which ranks are silent, announce it first."""
        if self._connections is None:
            return []
        ended = self._connections.num_ended()
        if not ended or ended <= len(self._others) - len(self.without(LEFT, SETTLED)):
            return []
        before, self._last_look = self._last_look, self.beats()
        return self.silent_since(before) if before else []

    def silent_since(self, before: Mapping[int, bytes]) -> list[int]:
        """Ranks whose heartbeat has stood still since `before` without a record of the reason. A
        rank that has only noticed a failure beats on, or is a slow process of this host."""
        beats = self.beats()
        still = [r for r in self.without(SETTLED, HEARD, LEFT) if beats[r] == before[r]]
        slow = [r for r in still if r in self._seen and process_state(self.pids[r]) == RUNS]
        return [rank for rank in still if not (rank in slow and self.noticed(rank) is not None)]

    # -- what is said of them ---------------------------------------------------------------------

    def server_obituary(self, error: BaseException) -> str:
        """A line about the store's dead server: reading from it raised `error`."""
        server = "the launcher" if self.hosted_by_agent else "rank 0"
        where = f" on {self.hosts[0]}" if self.hosts else ""
        # Torch's store ends its first line with the system's message, such as "Broken pipe".
        words = str(error).partition("\n")[0].rpartition(": ")[2]
        return (
            f"{server}{where}, which serves the rendezvous store, "
            f"vanished without a word ({words}); rank {self.rank} stops too"
        )

    def hosts_of(self, ranks: Sequence[int]) -> str:
        """Their hosts, with commas."""
        hosts = [self.processes[rank].host for rank in ranks if rank in self.processes]
        return ",".join(dict.fromkeys(hosts))

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
            causes = f"killed, out of memory, {why}"
            said.append(f"rank(s) {who}{where} vanished without a word ({causes})")
        # Two hosts may have one name: then a process with that id is here by chance.
        more = ", or the network to it is broken" if self.hosts else ""
        said += [
            f"rank {rank} (process {self.pids[rank]}) gives no sign of life ({state}{more})"
            for rank, state in states.items()
            if state != "ended"
        ]
        return "; ".join(said)


def process_state(pid: int) -> str:
    """Why a process of this host may be silent; "ended" if it has ended."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "ended"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "it is stopped, by a signal or a debugger"
    ended = status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return "ended" if ended else RUNS


def processor_s(pid: int) -> tuple[float, float]:
    """Seconds that the threads of a process of this host have run, and seconds that they were
    runnable but had no processor: so far, over all live threads (proc(5), `schedstat`); 0.0 if
    unknown."""
    ran_ns = queued_ns = 0
    with suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            ran, queued, _ = map(int, (thread / "schedstat").read_text().split())
            ran_ns, queued_ns = ran_ns + ran, queued_ns + queued
    return ran_ns / 1e9, queued_ns / 1e9
