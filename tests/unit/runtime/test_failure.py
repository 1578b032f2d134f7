"""The rank that failed: from the kind of error and the state of the other ranks to what is said."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from gradsync.errors import DataError, LatePeerError, LostPeerError, PeerError, RunError
from gradsync.runtime import peers
from gradsync.runtime import watch as watching
from gradsync.runtime.activity import Activity, read_activity
from gradsync.runtime.failure import Failure, communication_error, describe, read_failure
from gradsync.runtime.peers import Peers
from gradsync.runtime.store import HEARD, LEFT, NOTICED, Presence, record_of, wait_until
from gradsync.runtime.watch import FailureWatch

CLOSED = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:5: Connection reset"
)
LATE = "[/build/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20ms for recv"
AFTER_LATE = "Application timeout caused pair closure"
STORAGE = "connection reset by storage server"


def raise_compiled(words: str) -> None:
    """A `RuntimeError` that no `raise` statement raises, as gloo's."""
    ctypes.pythonapi.PyErr_SetString(ctypes.py_object(RuntimeError), words.encode())


def raise_python(words: str) -> None:
    raise RuntimeError(words)


def wrapped(words: str) -> None:
    try:
        raise_compiled(words)
    except RuntimeError as error:
        raise ValueError("training failed") from error


def interrupted(words: str) -> None:
    try:
        raise_compiled(words)
    except RuntimeError as error:
        raise KeyboardInterrupt from error


def torchs(words: str) -> None:
    raise dist.DistNetworkError(words)


def ours(words: str) -> None:
    raise LostPeerError(words)


def late(words: str) -> None:
    raise LatePeerError(words)


def caught(raises: Any, words: str) -> BaseException:
    try:
        raises(words)
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("raises", "words", "link"),
    [
        (raise_compiled, CLOSED, RuntimeError),
        (raise_compiled, AFTER_LATE, RuntimeError),
        (torchs, "Broken pipe", dist.DistNetworkError),
        (ours, "rank 1 has ended", LostPeerError),
        (wrapped, CLOSED, RuntimeError),
        # Errors of a data set are not of the communication, compiled or not.
        (raise_python, STORAGE, None),
        (raise_compiled, STORAGE, None),
        (raise_compiled, "recv: nccl or gloo? broken pipe in the process group", None),
        (raise_python, f"my bucket: {CLOSED}", None),
        (interrupted, CLOSED, None),
    ],
)
def test_what_comes_from_a_collective(raises: Any, words: str, link: type | None) -> None:
    found = communication_error(caught(raises, words))
    assert found is None if link is None else type(found) is link


class Store:
    """Records of a rendezvous in which rank 1 is as told: alive, silent, left."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.values: dict[str, bytes] = {}
        self.beats = 0

    def check(self) -> None:
        if self.peer == "store gone":
            raise dist.DistNetworkError("sendBytes failed: Broken pipe")

    def get(self, key: str) -> bytes | None:
        self.check()
        if key == "beat/1":
            self.beats += self.peer == "alive"
            return record_of(Activity(beat=self.beats, where="data.py:7 read"))
        return self.values.get(key)

    def set(self, key: str, value: str | bytes) -> None:
        self.check()
        self.values[key] = value.encode() if isinstance(value, str) else value

    def claim(self, key: str, value: bytes) -> bytes:
        if key not in self.values:
            self.set(key, value)
        return self.values[key]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    monkeypatch.setattr(watching, "_HEARD_S", 0.0)
    monkeypatch.setattr(watching, "_ECHO_S", 0.0)


ITSELF = {1: Presence(socket.gethostname(), "", os.getpid())}
ELSEWHERE = {1: Presence("there", "", 4711)}


def watch_of(store: Any, *, grace_s: float = 1.5, world_size: int = 2, **of: Any) -> FailureWatch:
    others = Peers(store, rank=0, world_size=world_size, **{"processes": ELSEWHERE, **of})
    watch = FailureWatch(store, others, grace_s=grace_s)
    watch._interval_s = 0.001
    return watch


def settled(store: Store, error: BaseException, **options: Any) -> RunError | None:
    watch = watch_of(store, **options)
    watch.start()
    return watch.settle(error)


def test_rank_0_does_not_stay_for_ranks_that_know_why_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has ended; rank 2 has read of it, and so never finds out by itself."""
    waited: list[bool] = []
    monkeypatch.setattr(peers, "wait_until", lambda over, _: waited.append(over()))
    store = Store("silent")
    store.values["noticed/2"] = HEARD
    watch = watch_of(store, world_size=3)
    watch.start()
    assert isinstance(watch.settle(caught(raise_compiled, CLOSED)), PeerError)
    assert waited == [True]


def test_ranks_are_told_how_far_each_one_is() -> None:
    store = Store("alive")
    watch = watch_of(store)
    watch.sampler.tell(7)
    watch.start()
    try:
        wait_until(lambda: watch.peers.everyone()[0].beat > 0, time.monotonic() + 60)
        found = watch.peers.everyone()
        assert [found[rank].step for rank in (0, 1)] == [7, 0]
        assert found[1].where == "data.py:7 read"
        assert read_activity(store.values["beat/0"]).step == 7
    finally:
        watch.stop()


def test_who_looks_for_the_cause_still_gives_signs_of_life() -> None:
    """Other ranks, which look as well, must not take it for the one that died."""
    store = Store("silent")
    watch = watch_of(store)
    watch.start()
    beats: list[int] = []

    def looked(seconds: float) -> list[int]:
        first = read_activity(store.values["beat/0"]).beat
        wait_until(lambda: read_activity(store.values["beat/0"]).beat > first + 2, seconds)
        beats.append(read_activity(store.values["beat/0"]).beat - first)
        return [1]

    watch.peers.silent_since = lambda _: looked(time.monotonic() + 60)
    assert isinstance(watch.settle(caught(raise_compiled, CLOSED)), PeerError)
    assert beats[0] > 2


PEERS = record_of(Failure(1, "there", "KeyError: 'x'", "Traceback: line 7"))


@pytest.mark.parametrize(
    ("raises", "words", "peer", "kind", "said"),
    [
        (raise_python, STORAGE, "alive", None, ""),
        (raise_compiled, CLOSED, "failed", PeerError, "rank 1 on there failed first: KeyError"),
        (raise_compiled, CLOSED, "silent", PeerError, "rank(s) 1 vanished without a word"),
        (raise_compiled, CLOSED, "left", LostPeerError, "rank(s) 1 had left in good order"),
        (raise_compiled, CLOSED, "alive", LostPeerError, "though every rank is alive"),
        (raise_compiled, LATE, "alive", LatePeerError, "(process 4711 on there) is in data.py:7"),
        (raise_compiled, AFTER_LATE, "alive", LatePeerError, "as long as it may (timeout_s)"),
        (wrapped, LATE, "alive", LatePeerError, "as long as it may (timeout_s)"),
        (raise_compiled, LATE, "silent", PeerError, "rank(s) 1 vanished without a word"),
        (raise_compiled, CLOSED, "noticed, then silent", PeerError, "rank(s) 1 vanished without"),
        (torchs, "wait timeout after 9 ms", "alive", None, ""),  # perhaps of another store
        (ours, "rank 1 has ended", "alive", None, ""),
        (late, "waited 9 s for rank(s) 1", "alive", LatePeerError, "(waited 9 s for rank(s) 1)"),
        (torchs, "Broken pipe", "silent", PeerError, "rank(s) 1 vanished without a word"),
        (torchs, "Broken pipe", "store gone", PeerError, "rank 0, which serves the rendezvous"),
        (raise_python, STORAGE, "store gone", None, ""),
    ],
)
def test_what_is_said(raises: Any, words: str, peer: str, kind: Any, said: str) -> None:
    store = Store(peer)
    if peer == "failed":
        store.values["failure"] = PEERS
    if peer == "left":
        store.values["noticed/1"] = LEFT
    if peer == "noticed, then silent":  # killed or cut off while it looked for the cause
        store.values["noticed/1"] = NOTICED
    error = caught(raises, words)
    cause = settled(store, error)
    assert type(cause) is (type(None) if kind is None else kind)
    assert said in str(cause)
    if peer == "failed":
        assert "Traceback: line 7" in str(cause)
    elif cause is not None:
        assert cause.__cause__ is error  # its traceback is shown, too
    if peer in ("alive", "left"):
        record = read_failure(store.values["failure"])
        assert record.exit_code == (124 if kind is LatePeerError else 1)
        assert record.summary == (str(cause) if cause is not None else record.summary)
        assert words in record.traceback_text + record.summary
    if raises is raise_python and peer == "alive":
        assert "in raise_python" in record.traceback_text


def test_a_server_that_leaves_as_it_hears_of_a_failure_did_not_vanish() -> None:
    store = Store("alive")
    claim = store.claim

    def last_word(key: str, value: bytes) -> bytes:
        found = claim(key, value)
        store.peer = "store gone"
        return found

    store.claim = last_word  # type: ignore[method-assign]
    assert type(settled(store, caught(raise_compiled, LATE))) is LatePeerError


def test_the_launcher_is_named_where_it_serves_the_store() -> None:
    gone = settled(Store("store gone"), caught(torchs, "Broken pipe"), hosted_by_agent=True)
    assert str(gone).startswith("the launcher, which serves the rendezvous store, vanished")


@pytest.mark.parametrize(
    ("shrinks", "hosts", "by_signal"),
    [(True, ["a", "b"], True), (True, [], False), (False, ["a", "b"], False)],
)
def test_a_rank_that_is_cut_off_ends_as_a_lost_one(
    shrinks: bool, hosts: list[str], by_signal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher may still reach the others, which an exit code would end. On one host the
    launcher itself is gone."""
    ends: list[int] = []
    monkeypatch.setattr(watching.threading, "Timer", MagicMock())
    monkeypatch.setattr(os, "kill", lambda _, number: ends.append(number))
    monkeypatch.setattr(os, "_exit", ends.append)
    watch = watch_of(Store("store gone"), grace_s=0.0, hosted_by_agent=True, hosts=hosts)
    watch._on_loss = (lambda: None) if shrinks else None
    watch.start()
    watch._thread.join(5.0)
    assert ends[0] == (signal.SIGKILL if by_signal else 1)


def test_a_server_that_has_left_in_good_order_takes_nobody_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(
        FailureWatch, "_end_process", lambda _, message, code: ended.append(message)
    )
    store = Store("alive")
    store.values["noticed/0"] = LEFT
    watch = watch_of(store, grace_s=0.0)
    read = store.get

    def last_look(key: str) -> bytes | None:
        found = read(key)
        store.peer = "store gone" if key == "noticed/0" else "alive"
        return found

    monkeypatch.setattr(store, "get", last_look)
    watch.start()
    watch._thread.join(5.0)
    assert not watch._thread.is_alive()
    assert ended == []


def test_who_serves_the_store_stays_until_the_others_have_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is done when rank 1 fails; rank 2, in a collective, has yet to read why."""
    monkeypatch.setattr(watching, "_SILENT_S", 5.0)
    store = Store("alive")
    store.values["failure"] = PEERS
    watch = watch_of(store, world_size=3)
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(watch.peer_failure)
        with pytest.raises(TimeoutError):
            left.result(timeout=0.1)
        store.set("noticed/2", HEARD)
        assert "rank 1 on there failed first" in str(left.result(timeout=3.0))


def test_who_fails_waits_for_those_that_live_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy rank may take seconds to read why, and would blame the store that went with rank 0."""
    monkeypatch.setattr(watching, "_HEARD_S", 60.0)
    store = Store("alive")
    watch = watch_of(store, world_size=3)
    watch._waits.silent = [2]
    watch.start()
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(watch.settle, ValueError("mine"))
        with pytest.raises(TimeoutError):
            left.result(timeout=0.3)
        store.set("noticed/1", HEARD)
        assert left.result(timeout=10.0) is None


def test_the_rank_whose_time_was_up_speaks_before_those_it_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They see a connection end in the same moment, which is no reason and not 124."""
    monkeypatch.setattr(watching, "_ECHO_S", 60.0)
    store = Store("alive")
    with ThreadPoolExecutor(1) as threads:
        hung_up_on = threads.submit(settled, store, caught(raise_compiled, CLOSED))
        with pytest.raises(TimeoutError):
            hung_up_on.result(timeout=0.3)
        assert isinstance(settled(store, caught(raise_compiled, LATE)), LatePeerError)
        assert "as long as it may (timeout_s)" in str(hung_up_on.result(timeout=10.0))


def test_a_stopped_process_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
    cause = settled(Store("silent"), caught(raise_compiled, LATE), processes=ITSELF)
    assert f"rank 1 (process {os.getpid()}) gives no sign of life (it is stopped" in str(cause)
    assert "vanished" not in str(cause)
    assert isinstance(cause, PeerError)
    assert cause.exit_code == 124  # it was late; a rank that has gone is no such thing


@pytest.mark.parametrize(
    ("peer", "word", "host", "told"),
    [
        ("silent", None, socket.gethostname(), True),
        ("alive", None, socket.gethostname(), False),  # on another host of this name
        ("silent", LEFT, socket.gethostname(), False),
        ("silent", NOTICED, socket.gethostname(), False),  # it is about to say why
        ("silent", None, "there", False),
    ],
)
def test_a_death_is_told_while_the_main_thread_computes(
    peer: str, word: bytes | None, host: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share memory have no connection that ends, and meet at a step's end only."""
    said: list[str] = []
    monkeypatch.setattr(FailureWatch, "_end_process", lambda _, message, code: said.append(message))
    store = Store(peer)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = watch_of(store, grace_s=0.0, processes={1: Presence(host, "", process.pid)})
        if word is not None:
            store.values["noticed/1"] = word
        process.kill()
        watch.start()
        assert wait_until(lambda: bool(said), time.monotonic() + (5.0 if told else 0.1)) is told
        watch.stop()
    record = store.values.get("failure")
    assert (record is not None) is told  # ranks on other hosts read of it
    if told:
        assert "rank(s) 1 vanished without a word" in said[0]
        assert str(read_failure(record or b"")).count("rank(s) 1 vanished") == 1


def test_a_process_that_was_never_here_does_not_end_here() -> None:
    """Its host has this one's name; it holds Python's lock, so no heartbeat comes."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        elsewhere = {1: Presence(socket.gethostname(), "", process.pid)}
        others = peers.Peers(Store("silent"), rank=0, world_size=2, processes=elsewhere)  # type: ignore
        assert [others.dead() for _ in range(5)] == 5 * [[]]


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [b"", b"{", b"[1]", b"\xff\xfe{", b'{"rank": 1}'])
def test_a_broken_record_is_named(record: bytes) -> None:
    assert "left an unreadable record of it" in read_failure(record).summary


@pytest.mark.parametrize("error", [DataError("gone"), KeyError("x"), ValueError("y" * 10**5)])
def test_what_a_rank_writes_down_can_be_read(error: BaseException) -> None:
    written = describe(error, 3)
    assert read_failure(record_of(written)) == written


@pytest.mark.parametrize(("code", "said"), [(130, ""), (1, "failed first: it has ended")])
def test_an_interrupt_is_said_by_the_rank_that_it_hit(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An interrupt that comes just before `time.sleep` does not end it: the watch does."""
    ended: list[int] = []
    monkeypatch.setattr(watching.os, "_exit", ended.append)
    monkeypatch.setattr(watching.threading, "Timer", MagicMock())
    store = Store("alive")
    store.values["failure"] = record_of(Failure(1, "there", "it has ended", "", code))
    watch = watch_of(store, grace_s=0.0)
    watch.start()
    watch._thread.join(5.0)
    printed = capfd.readouterr().err
    assert ended == [1]
    assert (said in printed) if said else not printed
