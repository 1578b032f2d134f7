"""Watch the other ranks while this one runs: when one fails, all end within seconds and say why.

    rank 1 raises            -> writes its traceback to the store, waits for answers, leaves
    rank 2 raises the same   -> leaves the traceback to rank 1, if they share a host (signals.py)
    rank 0, in Python code   -> its watcher sees the note; after a grace the process ends
    rank 0, in a collective  -> the connection closes, the collective raises; the note says why
    rank 1 is killed (-9)    -> no note; ranks of its host look at its process in each beat, and
                                write it down for the others; else its heartbeat that stopped says
                                who
    rank 1's host is cut off -> as killed, once its connections have timed out (`silence_s`)
    rank 1 left              -> rank 0's collective raises, says so, is written down
    rank 1 is late           -> rank 0 says after ten seconds where rank 1 is (waiting.py); after
                                `timeout_s` its collective raises, and all end with code 124;
                                once a stop was asked for, after ten seconds instead

A thread per rank reads one key of the store and writes one heartbeat, with the main thread's
activity (activity.py), a few times a second. Records are signed with the job's token (store.py).
When a rank is late or dead, every rank writes its stacks before it ends (stacks.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from gradsync.core.files import printable
from gradsync.errors import LatePeerError, LostPeerError, PeerError, RunError
from gradsync.runtime.activity import Activity, Sampler
from gradsync.runtime.failure import (
    Failure,
    communication_error,
    describe,
    is_gloos,
    is_late,
    read_failure,
    symptom,
)
from gradsync.runtime.peers import Peers
from gradsync.runtime.signals import (
    INTERRUPTED,
    SAID_BY_ANOTHER,
    StopRequest,
    say_interrupted,
    signal_when_parent_ends,
)
from gradsync.runtime.stacks import StackFiles, read_stack, stack_lines
from gradsync.runtime.store import HEARD, LEFT, NOTICED, SETTLED, SignedStore, record_of, wait_until
from gradsync.runtime.waiting import WaitReport

REPORT_S = 10.0
"""Seconds after which a wait for another rank is reported."""

log = logging.getLogger("gradsync")

_POLL_S = 0.25
_GRACE_S = 1.5
_EXCUSED_GRACES = 5  # a nearly written checkpoint is worth some seconds
_SILENT_S, _HEARD_S = 2.0, 5.0
_LAST_WORDS_S = 2.0
_COMES_S = 20.0
_WRITTEN_S = _ECHO_S = 0.5
_BEATS_A_LOOK = 8


class FailureWatch:
    """Watches for other ranks' failures; publishes this rank's.

    Args:
        store: the rendezvous's records, over a connection that nothing else blocks on.
        peers: the other ranks.
        grace_s: time for the main thread to notice a failure itself; five times that in a save.
        stacks: writes the stacks of this rank; None writes nothing.
        on_loss: called when another rank is dead, or silent for `silence_s`, so that the main
            thread notices and goes on without it; None ends the run.
        report_s, num_issued: see `WaitReport` and `Sampler`.
    """

    def __init__(
        self,
        store: SignedStore,
        peers: Peers,
        *,
        grace_s: float = _GRACE_S,
        report_s: float = REPORT_S,
        num_issued: Callable[[], int] = lambda: 0,
        stacks: StackFiles | None = None,
        on_loss: Callable[[], None] | None = None,
        silence_s: float = 10.0,
    ) -> None:
        from torch.distributed import DistError

        # The client raises it once its server is gone. A wider class would include our own bugs.
        self._store_gone = DistError
        self._store, self.peers, self._rank = store, peers, peers.rank
        self._stacks, self._on_loss, self._silence_s = stacks, on_loss, silence_s
        self.sampler = Sampler(threading.get_ident(), num_issued)
        self._doing = Activity(beat=0)
        self._waits = WaitReport(peers, report_s=report_s)
        self._stop_seen: float | None = None
        self._waited = 0
        self._grace_s = grace_s
        self._interval_s = max(_POLL_S, peers.world_size / 1000)  # many ranks share one store
        self._stop = threading.Event()
        self._seen: Failure | None = None
        self._store_lost: Exception | None = None
        self._server_left = False
        self._thread = threading.Thread(target=self._run, name="gradsync-watch", daemon=True)

    def start(self) -> None:
        """Begin watching."""
        # Ctrl-C may skip the session's end; Python's exit then aborts on a thread in torch's code.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and its thread."""
        self._stop.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        atexit.unregister(self.stop)

    def settle(self, error: BaseException) -> RunError | None:
        """Whose failure `error` is: None for our own (now published), else the error to raise.

        That error has `error` as its cause unless another rank's traceback explains it. Ends the
        watch, so that the main thread can finish undisturbed.
        """
        self.stop()
        trouble = communication_error(error)
        try:
            if trouble is None:
                first = self._publish(error)
                mine = describe(error, self._rank)
                if first is not None and first == replace(mine, rank=first.rank):
                    setattr(error, SAID_BY_ANOTHER, True)
                return None
            with self.peers.told_of_life(self._doing, self._interval_s):
                return self._settle_trouble(error, trouble)
        except self._store_gone as gone:
            if trouble is None or self._server_left:
                say_interrupted(error)
                return None  # no reader is left
            said = self.peers.server_obituary(self._store_lost or gone)
            return _because(PeerError(said + self._keep_stacks(error)), error)

    def _settle_trouble(self, error: BaseException, trouble: BaseException) -> RunError | None:
        """The rank that made a collective fail: it recorded a failure, is silent, has left or is
        late. None: only `error` is known."""
        if self._seen is None:
            self.peers.notice(NOTICED)
        began = time.monotonic()
        # A failing rank records the reason before its process ends. A rank that times out closes
        # its connections: ranks that only see them close let it write first.
        wait_until(
            lambda: (
                self._read() is not None
                or (time.monotonic() - began > _WRITTEN_S and bool(self.peers.ended()))
            ),
            began + _SILENT_S + _ECHO_S * (not is_late(trouble)),
        )
        failure, cause = self._read(), None
        if failure is None:
            silent = self.peers.ended()
            if not silent:
                before = self.peers.beats()
                time.sleep(3 * self._interval_s)
                silent = self.peers.silent_since(before)
            if silent:
                said = self.peers.obituary(silent)
                seen = f"this rank ({self._rank}) saw: {trouble}{self._keep_stacks(error)}"
                lives = not self.peers.ended() and all(r in self.peers.pids for r in silent)
                code = LatePeerError.exit_code if lives and is_late(trouble) else 1
                # Ranks without a connection to the silent ones would only see us leave.
                hosts = self.peers.hosts_of(silent)
                record = record_of(Failure(-1, hosts, said, "", code, stuck=True))
                self._store.claim("failure", record)
                self.peers.settle(len(silent), time.monotonic() + _SILENT_S)
                return _because(PeerError(f"{said}; {seen}", exit_code=code, host=hosts), error)
            kept = self._keep_stacks(error)
            cause = self._explain(trouble, kept)
            failure = self._publish(error, cause, stuck=True)
        elif failure.stuck:
            self._keep_stacks(error)
        if failure:
            log.info("rank %d saw", self._rank, exc_info=error)
            return failure.as_error()
        return cause and _because(cause, error)

    def _explain(self, trouble: BaseException, kept: str) -> RunError | None:
        """Why this rank's collective failed although every rank lives; None if `trouble` explains
        it. Gloo's message names a symptom; torch's and ours only lack the late ranks."""
        if is_late(trouble):
            late = self._waits.lateness(self._doing)
            return LatePeerError(f"{late} ({symptom(trouble)}){kept}")
        if not is_gloos(trouble):
            return None
        said = (
            f"rank {self._rank}: a connection to another rank ended, though every rank is alive "
            "and none has failed or left"
        )
        if self._on_loss is not None:
            said += ", or this group was made before a loss: make another one after it"
        if left := self.peers.left():
            said = (
                f"rank(s) {', '.join(map(str, left))} had left in good order while rank "
                f"{self._rank} still communicates; all must call the same collectives "
                "(sync.step: stop=True ends all)"
            )
        return LostPeerError(f"{said} ({symptom(trouble)}){kept}")

    def peer_failure(self) -> PeerError | None:
        """Another rank's failure record, if there is one; for a rank that has said farewell."""
        try:
            failure = self._read()
        except self._store_gone:
            return None  # the store ended in good order
        if failure is None:
            return None
        if self._rank == 0 and not self.peers.hosted_by_agent:
            # The serving rank stays until the others have heard. Its own farewell counts.
            until, failed = time.monotonic() + _SILENT_S, {failure.rank}
            wait_until(lambda: failed.issuperset(self.peers.without(HEARD, LEFT)), until)
        return failure.as_error()

    def _publish(
        self, error: BaseException, cause: RunError | None = None, *, stuck: bool = False
    ) -> Failure | None:
        """Record `error`; returns another rank's failure instead if that one was first."""
        record = record_of(replace(describe(error, self._rank, cause), stuck=stuck))
        if self._store.claim("failure", record) != record:
            return self._read()
        say_interrupted(error, f"rank {self._rank} ")
        with suppress(self._store_gone):  # rank 0 serves it, and leaves once it has heard
            wait_until(
                lambda: {*self._waits.silent, *self.peers.ended()}.issuperset(
                    self.peers.without(HEARD, LEFT)
                ),
                time.monotonic() + _HEARD_S,
            )
        return None

    def _read(self) -> Failure | None:
        if self._seen is None and (record := self._store.get("failure")) is not None:
            self._seen = read_failure(record)
            self.peers.notice(HEARD)
        return self._seen

    def _keep_stacks(self, error: BaseException | None = None) -> str:
        return self._stacks.keep(self._rank, error) if self._stacks else ""

    def _run(self) -> None:
        signal_when_parent_ends(signal.SIGCONT)
        beat = mishaps = 0
        while not self._stop.wait(self._interval_s if beat else 0):
            beat += 1
            try:
                message = self._news(beat)
            except Exception:  # a bug of ours must not end the watch
                mishaps += 1
                if mishaps == 1:
                    log.exception("rank %d: the failure watch stumbled", self._rank)
                continue
            grace_s = self._grace_s * (_EXCUSED_GRACES if self._doing.excused else 1)
            if message and not self._stop.wait(grace_s):
                self._end_process(message, 1 if self._seen is None else self._seen.exit_code)
            if message or self._store_lost is not None:
                return

    def _news(self, beat: int) -> str:
        """Publish a heartbeat and check the other ranks; returns the reason to end, if any."""
        try:
            self._doing = self.sampler.sample(beat)
            self._store.set(f"beat/{self._rank}", record_of(self._doing))
            failure = self._read()
            if failure is not None:
                if failure.stuck:
                    self._keep_stacks()
                return str(failure.as_error())
            if said := self._waits.news(self._doing, time.monotonic(), self.peers.everyone):
                sys.stderr.write(f"gradsync: {said}\n")
                sys.stderr.flush()
            if late := self._late_for_a_stop():
                self._publish(late, stuck=True)
                self._end_process(str(late), late.exit_code)
            if not self.peers.hosted_by_agent:
                self._server_left = self.peers.noticed(0) == LEFT
            if self._on_loss is not None:
                present = self.peers.without(LEFT, SETTLED, HEARD)
                lost = sorted(self.peers.lost(present, self._silence_s))
                if lost:
                    self._on_loss()
                # The main thread notices and comes, unless it waits for something else.
                self._waited = self._waited + 1 if lost and self._doing.waits else 0
                if self._waited * self._interval_s < _COMES_S:
                    return ""
            if lost := self.peers.dead() or (beat % _BEATS_A_LOOK == 0 and self.peers.cut_off()):
                said = self.peers.obituary(lost)
                hosts = self.peers.hosts_of(lost)
                self._store.claim("failure", record_of(Failure(-1, hosts, said, "", stuck=True)))
                self._read()  # tells the others that this rank knows; its heartbeat has stopped
                return said + self._keep_stacks()
        except self._store_gone as gone:
            self._store_lost = gone
            if not self._server_left:
                return self.peers.server_obituary(gone) + self._keep_stacks()
        return ""

    def _late_for_a_stop(self) -> LatePeerError | None:
        """Ranks agree on a stop at the end of a step. A rank that does not get there would hold up
        the others until the launcher or the scheduler kills all."""
        stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if not isinstance(stop, StopRequest) or not stop.requested:
            return None
        now = time.monotonic()
        self._stop_seen = self._stop_seen or now
        if not self._waits.stuck or now - self._stop_seen < self._waits.report_s:
            return None
        return LatePeerError(
            f"{stop.signal_name} asked for a stop {now - self._stop_seen:.0f} s ago, but "
            f"{self._waits.places(self._waits.stuck)}; ended without another checkpoint"
            f"{self._keep_stacks()}"
        )

    def _end_process(self, message: str, code: int) -> None:
        """End the process while the main thread hangs in a collective or computes."""
        # A stuck reader of our output must not keep this process alive.
        threading.Timer(_LAST_WORDS_S, os._exit, (1,)).start()
        with suppress(Exception):
            if code == LatePeerError.exit_code and not self._doing.waits:
                stack = "".join(stack_lines(read_stack(self.sampler.thread)))
                message += f"\n--- rank {self._rank} was here ---\n{stack.rstrip()}"
            if code != INTERRUPTED:  # the rank that Ctrl-C hit reports it for all
                sys.stderr.write(f"gradsync: error: [rank {self._rank}] {printable(message)}\n")
                sys.stderr.flush()
            sys.stdout.flush()
        if self._on_loss and self._store_lost and self.peers.hosted_by_agent and self.peers.hosts:
            os.kill(os.getpid(), signal.SIGKILL)  # cut off, thus lost: a code would end the run
        os._exit(code if code == LatePeerError.exit_code else 1)


def _because(cause: RunError, error: BaseException) -> RunError:
    cause.__cause__ = error
    return cause
