"""One rank's failure ends all ranks within seconds; all show that rank's traceback.

    rank 1 raises            -> writes its traceback to the store, waits for answers, leaves
    rank 0, in Python code   -> its watcher sees the note; after a grace the process ends
    rank 0, in a collective  -> the connection closes, the collective raises; the note says why
    rank 1 is killed (-9)    -> no note; the heartbeat that stopped says who
    rank 1's host is cut off -> as killed, once its connections have timed out (`silence_s`)

A thread per rank reads one key of the store and writes one heartbeat a few times a second.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.errors import GradsyncError, LostPeerError, PeerError
from gradsync.runtime.peer_connections import PeerConnections
from gradsync.runtime.store import wait_until

_POLL_S = 0.25
_GRACE_S = 5.0
_SILENT_S = 2.0
_BEATS_A_LOOK = 8
_TRACEBACK_LIMIT = 20_000
# What the store's client raises once its server has gone (torch's DistError is a RuntimeError).
# Nothing wider: a mistake of ours must not be reported as somebody else's death.
_STORE_GONE = RuntimeError
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|recv|process ?group|pair closure",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run, as the failing rank wrote it down."""

    rank: int
    host: str
    summary: str
    traceback_text: str
    """Empty for errors that gradsync raises on purpose: their one line says it all."""
    exit_code: int = 1

    def as_error(self) -> PeerError:
        """The exception that the other ranks raise."""
        message = f"rank {self.rank} on {self.host} failed first: {self.summary}"
        if self.traceback_text:
            message += f"\n--- traceback of rank {self.rank} ---\n{self.traceback_text.rstrip()}"
        return PeerError(
            message,
            rank=self.rank,
            traceback_text=self.traceback_text,
            exit_code=self.exit_code,
        )


def looks_like_lost_peer(error: BaseException) -> bool:
    """True for what a collective or the store raises when another process has gone."""
    kinds = ("DistError", "DistNetworkError", "DistBackendError", "DistStoreError")
    if isinstance(error, LostPeerError):
        return True
    if any(base.__name__ in kinds for base in type(error).__mro__):
        return True
    return type(error) is RuntimeError and bool(_LOST_PEER.search(str(error)))


class FailureWatch:
    """Watches for other ranks' failures; tells them ours.

    Args:
        store: a connection to the rendezvous store that nothing else blocks on.
        rank, world_size: as in `World`.
        hosts: host name of each rank, if they sit on several.
        connections: to the other ranks; looked after from here on.
        grace_s: how long the main thread may take to notice by itself before the process ends.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        hosts: Sequence[str] = (),
        connections: PeerConnections | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._hosts = hosts
        self._connections = connections
        self._grace_s = grace_s
        # Many ranks share one store: the more there are, the rarer each one's heartbeat.
        self._interval_s = max(_POLL_S, world_size / 1000)
        self._stop = threading.Event()
        self._seen: Failure | None = None
        self._store_lost: RuntimeError | None = None
        self._last_look: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="gradsync-watch", daemon=True)

    def start(self) -> None:
        """Begin watching."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch; returns once the thread has gone."""
        self._stop.set()
        self._thread.join()

    def settle(self, error: BaseException) -> PeerError | None:
        """Decide whose failure `error` is: None for our own (now published), else the peer's.

        Ends the watch, so that the main thread, which has noticed, may finish in peace.
        """
        self.stop()
        if not looks_like_lost_peer(error):
            self._publish(error)
            return None
        try:
            # No heartbeat comes from here any more; the others must not take us for the dead one.
            self._store.set(f"noticed/{self._rank}", "")
            wait_until(lambda: self._read() is not None, time.monotonic() + _SILENT_S)
            failure = self._read()
            if failure is not None:
                return failure.as_error()
            silent = self._silent_ranks()
            self._wait_for_survivors(len(silent))
        except _STORE_GONE as gone:
            # The first error on the connection says why; this may be its echo.
            return PeerError(self._coordinator_gone(self._store_lost or gone), rank=0)
        return PeerError(f"{_obituary(silent, self._hosts)}; this rank ({self._rank}) saw: {error}")

    def peer_failure(self) -> PeerError | None:
        """What another rank has written down by now, if any."""
        try:
            failure = self._read()
        except _STORE_GONE:
            return None  # the store has gone, in good order
        return failure.as_error() if failure is not None else None

    def _wait_for_survivors(self, num_silent: int) -> None:
        """Rank 0 serves the store: it stays until the others know as much as it does."""
        self._store.add("settled", 1)
        survivors = self._world_size - num_silent
        if self._rank == 0:
            wait_until(
                lambda: self._store.add("settled", 0) >= survivors, time.monotonic() + _SILENT_S
            )

    def _publish(self, error: BaseException) -> None:
        failure = _describe(error, self._rank)
        try:
            if self._store.add("failures", 1) > 1:
                return  # somebody was first; theirs is the cause worth showing
            self._store.set("failure", json.dumps(asdict(failure)))
            wait_until(
                lambda: self._store.add("acknowledged", 0) >= self._world_size - 1,
                time.monotonic() + _SILENT_S,
            )
        except _STORE_GONE:
            return  # the store's host has gone: nobody is left to be told

    def _read(self) -> Failure | None:
        if self._seen is None and self._store.check(["failure"]):
            self._seen = Failure(**json.loads(self._store.get("failure")))
            self._store.add("acknowledged", 1)
        return self._seen

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(self._interval_s):
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", str(beat))
                failure = self._read()
                if failure is not None:
                    message = str(failure.as_error())
                elif beat % _BEATS_A_LOOK == 0 and (lost := self._look_around()):
                    message = _obituary(lost, self._hosts)
                else:
                    continue
            except _STORE_GONE as gone:
                self._store_lost = gone
                message = self._coordinator_gone(gone)
            if not self._stop.wait(self._grace_s):
                self._end_process(message)
            return

    def _look_around(self) -> list[int]:
        """Ranks that went without a word, should the main thread not notice.

        Gloo does not always wake who waits on a connection that ends. One that has ended says that
        a process has gone, whatever it was doing; ranks that leave in good order say so before.
        """
        if self._connections is None:
            return []
        self._connections.keep_up()
        ended = self._connections.num_ended()
        if not ended or ended <= self._store.add("farewell", 0) + self._store.add("settled", 0):
            return []
        before, self._last_look = self._last_look, self._heartbeats()
        return self._silent_since(before) if before else []

    def _coordinator_gone(self, error: BaseException) -> str:
        where = f" on {self._hosts[0]}" if self._hosts else ""
        return (
            f"rank 0{where}, which serves the rendezvous store, vanished without a word "
            f"({_cause(error)}); rank {self._rank} stops too"
        )

    def _end_process(self, message: str) -> None:
        """The main thread hangs in a collective or computes on: end it from here."""
        sys.stderr.write(f"gradsync: error: [rank {self._rank}] {message}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)

    def _silent_ranks(self) -> list[int]:
        before = self._heartbeats()
        time.sleep(3 * self._interval_s)
        return self._silent_since(before)

    def _silent_since(self, before: Mapping[int, bytes]) -> list[int]:
        """Ranks whose heartbeat stands still, and that did not say why."""
        after = self._heartbeats()
        return [
            rank
            for rank, beat in after.items()
            if beat == before[rank] and not self._store.check([f"noticed/{rank}"])
        ]

    def _heartbeats(self) -> dict[int, bytes]:
        others = (rank for rank in range(self._world_size) if rank != self._rank)
        keys = {rank: f"beat/{rank}" for rank in others}
        return {
            rank: self._store.get(key) if self._store.check([key]) else b""
            for rank, key in keys.items()
        }


def _describe(error: BaseException, rank: int) -> Failure:
    host = socket.gethostname()
    if isinstance(error, GradsyncError):
        return Failure(rank, host, str(error), "", error.exit_code)
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:]
    return Failure(rank, host, traceback.format_exception_only(error)[-1].strip(), text)


def _obituary(silent: list[int], hosts: Sequence[str]) -> str:
    if not silent:
        return "a connection to another rank broke, though all ranks are alive"
    names = ", ".join(map(str, silent))
    if not hosts:
        return f"rank(s) {names} vanished without a word (killed, out of memory, or the host died)"
    theirs = ", ".join(dict.fromkeys(hosts[rank] for rank in silent))
    return (
        f"rank(s) {names} on {theirs} vanished without a word (killed, out of memory, the host "
        "died, or the network to it is broken)"
    )


def _cause(error: BaseException) -> str:
    """The system's own words at the end of what torch's store raises, such as "Broken pipe"."""
    first = str(error).partition("\n")[0]
    return first.rpartition(": ")[2]
