"""Records that strangers cannot make, move or bring back; what they write instead is told once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.errors import LaunchError, RendezvousError
from gradsync.runtime.store import TOKEN, Presence, SignedStore, check_in, token_of

SECRET = b"0123456789abcdef" * 4


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
        lambda store: records(store, token=b"guess").set("a", "x"),
        lambda store: records(store, scope="0/2").set("a", "x"),
        lambda store: store.set("a", store.get("true")),
    ],
    ids=["plain", "other token", "another session's", "another key's"],
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


def test_ranks_with_different_tokens_do_not_meet(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    records(store, token=b"another").set("here/1", json.dumps(asdict(Presence("h", "", 1))))
    with pytest.raises(RendezvousError, match=rf"in vain for rank\(s\) 1 of 2.*, or .*{TOKEN}"):
        check_in(records(store), Presence("h", "", 1), rank=0, world_size=2, deadline_s=0.0)
    assert f"or ranks were given different {TOKEN}s" in capfd.readouterr().err


def test_tokens() -> None:
    with pytest.raises(LaunchError, match=f"{TOKEN} must have at least 32 characters"):
        token_of({TOKEN: "short"})
    assert token_of({}) == token_of({TOKEN: " "}) == b""
    first, second = (token_of({TOKEN: letter * 32}) for letter in "ab")
    assert first != second
    assert len(first) == 64
