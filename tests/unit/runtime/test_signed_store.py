"""Records that strangers cannot make, move or bring back; what they write instead is told once."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given

from gradsync.errors import LaunchError, RendezvousError
from gradsync.runtime.activity import Activity, read_activity
from gradsync.runtime.failure import Failure, read_failure
from gradsync.runtime.peers import Peers
from gradsync.runtime.store import (
    TOKEN,
    Presence,
    SignedStore,
    check_in,
    host_store,
    join_store,
    token_of,
)
from support.fuzz import changed, damaged, fuzzed, randoms, text_of, within_seconds

SECRET = b"0123456789abcdef" * 4
STEERING = "\x1b]0;owned\x07\x1b[2J"


def records(store: Any, token: bytes = SECRET, scope: str = "0/1") -> SignedStore:
    return SignedStore(store, token, scope)


def test_a_rank_reads_what_another_wrote() -> None:
    store = dist.HashStore()
    first, second = records(store), records(store)
    assert second.get("a") is None
    assert second.get_all(["a", "b"]) == []
    first.set("a", "text é")
    first.set("b", b"")
    assert second.get("a") == "text é".encode()
    assert second.get_all(["a", "b"]) == ["text é".encode(), b""]
    assert second.wait("b", timedelta(seconds=1)) == b""
    assert second.claim("a", "later") == "text é".encode()
    assert (first.claim("c", "mine"), second.claim("c", "theirs")) == (b"mine", b"mine")
    assert first.name("x") == second.name("x") != first.name("y")


@pytest.mark.parametrize(
    "forge",
    [
        lambda store: store.set("a", "plain"),
        lambda store: store.set("a", b"\xff" * 80),
        lambda store: records(store, token=b"guess").set("a", "x"),
        lambda store: records(store, token=b"").set("a", "x"),
        lambda store: records(store, scope="0/2").set("a", "x"),
        lambda store: store.set("a", store.get("true")),
        lambda store: store.set("a", store.get("true")[:70]),
        lambda store: store.set("a", hashlib.sha256(b"x").hexdigest().encode() + b"x"),
        lambda store: records(store).set("a", b"x" * 2**20),
    ],
    ids=[
        *("plain", "bytes", "other token", "no token", "another session's", "another key's"),
        *("cut", "plain hash", "too large"),
    ],
)
def test_what_no_rank_has_signed_is_not_there(
    forge: Callable[[Any], None], capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    reader = records(store)
    reader.set("true", "said")
    forge(store)
    again = reader.over(store)  # the connection of a thread
    assert (reader.get("a"), again.get("a"), reader.get_all(["a", "true"])) == (None, None, [])
    assert capfd.readouterr().err.count("gradsync: ignored") == 1
    assert reader.claim("a", "mine") == b"mine"
    assert reader.get("a") == b"mine"


def test_what_a_stranger_writes_does_not_steer_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = dist.HashStore()
    store.set("failure", STEERING)
    assert records(store).get("failure") is None
    said = capfd.readouterr().err
    assert said.startswith(
        r"""gradsync: ignored b'\x1b]0;owned\x07\x1b[2J' under 'failure' in the rendezvous store"""
    )
    assert said.isascii()
    assert said[:-1].isprintable()


def test_a_heartbeat_that_is_put_back_is_no_sign_of_life() -> None:
    store = dist.HashStore()
    peers = Peers(records(store), rank=0, world_size=2)
    seen = []
    for beat in (1, 2):
        records(store).set("beat/1", Activity(beat=beat).record())
        seen.append(store.get("beat/1"))
        before = peers.beats()
    store.set("beat/1", seen[0])
    assert peers.silent_since(before) == [1]
    assert peers.activities()[1].beat == 2


def test_a_presence_is_written_again_over_a_strangers(capfd: pytest.CaptureFixture[str]) -> None:
    server = host_store("127.0.0.1", 0, one_host=True)
    stranger = dist.TCPStore("127.0.0.1", server.port, None, wait_for_workers=False)
    written: list[str] = []

    class Watched(SignedStore):
        """Over whose records a stranger writes once."""

        def set(self, key: str, text: str | bytes) -> None:
            super().set(key, text)
            if key not in written:
                written.append(key)
                stranger.set(key, json.dumps(asdict(Presence(STEERING, "", 1))))

    met: dict[int, list[Presence]] = {}

    def rank_arrives(rank: int) -> None:
        until = time.monotonic() + 10
        client = join_store("127.0.0.1", server.port, rank=rank, deadline_s=until)
        met[rank] = check_in(
            Watched(client, SECRET, "0/1"),
            Presence(f"h{rank}", "", 100 + rank),
            rank=rank,
            world_size=2,
            deadline_s=until,
        )

    ranks = [threading.Thread(target=rank_arrives, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [[each.host for each in met[rank]] for rank in range(2)] == [["h0", "h1"]] * 2
    assert "\x1b" not in capfd.readouterr().err


def test_ranks_with_different_tokens_do_not_meet(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    records(store, token=b"another").set("here/1", json.dumps(asdict(Presence("h", "", 1))))
    with pytest.raises(RendezvousError, match=rf"in vain for rank\(s\) 1 of 2.*, or .*{TOKEN}"):
        check_in(records(store), Presence("h", "", 1), rank=0, world_size=2, deadline_s=0.0)
    assert f"or ranks were given different {TOKEN}s" in capfd.readouterr().err


@pytest.mark.parametrize("token", ["short", "with blanks " * 4, "\x1b" * 40, "x" * 2_000])
def test_a_token_that_is_none(token: str) -> None:
    with pytest.raises(LaunchError, match=f"{TOKEN} must have 32 to 1,024") as raised:
        token_of({TOKEN: token})
    assert token not in str(raised.value)


def test_tokens() -> None:
    assert token_of({}) == token_of({TOKEN: " "}) == b""
    first, second = (token_of({TOKEN: letter * 32}) for letter in "ab")
    assert first != second
    assert len(first) == 64


# -- ten thousand frames: see support/fuzz.py -----------------------------------------------------

FRAMES = {
    "failure": asdict(Failure(1, "there", "KeyError", "Traceback", 2)),
    "beat/1": asdict(Activity(beat=3, where="a.py:1 f")),
    "here/1": asdict(Presence("there", "GPU-1", 4711)),
}


@fuzzed
@given(randoms)
def test_any_frame_is_read_or_ignored(random: Random) -> None:
    """From a stranger: bytes of a true record, damaged, moved or made up. From a rank of another
    version: anything, signed."""
    store = dist.HashStore()
    writer, reader = records(store), records(store)
    key = random.choice(list(FRAMES))
    text = json.dumps(FRAMES[key]).encode()
    writer.set(key, text)
    true = store.get(key)
    kind = random.randrange(4)
    if kind == 0:
        store.set(key, damaged(true, random))
    elif kind == 1:
        store.set(key, true[:64] + text_of(changed(FRAMES[key], random), random))
    elif kind == 2:
        store.set(key, random.randbytes(random.choice((0, 1, 63, 64, 65, 300))))
    else:
        writer.set(key, text_of(changed(FRAMES[key], random), random))
    with within_seconds():
        found = reader.get(key)
        assert reader.get_all([key]) == ([] if found is None else [found])
        if kind < 3:
            assert found in (None, text)
        read_failure(found or b"").as_error()
        read_activity(found or b"")
        for rank in (0, 1):
            store.set(f"here/{rank}", true)
        if found is not None:
            writer.set("here/1", found)
            with suppress(RendezvousError):
                presence = Presence("h", "", 1)
                check_in(reader, presence, rank=0, world_size=2, deadline_s=0.0)


def test_noise_on_the_port_leaves_the_store_as_it_was() -> None:
    server, random = host_store("127.0.0.1", 0, one_host=True), Random(1)
    records(server).set("beat/1", "alive")
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            noise = random.randbytes(random.choice((1, 4, 5, 9, 64, 1_000)))
            stranger.sendall(bytes([random.choice((0, 1, 2, 3, 9, 60, noise[0]))]) + noise)
    client = join_store("127.0.0.1", server.port, rank=1, deadline_s=float("inf"))
    assert records(client).get("beat/1") == b"alive"
