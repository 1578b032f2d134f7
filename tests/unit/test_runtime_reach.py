"""Whether hosts reach each other on free ports: all ranks hear what one of them found."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.errors import RendezvousError
from gradsync.runtime import reach
from gradsync.runtime.reach import check_reach
from gradsync.world import World

HOSTS = ["first", "first", "second", "second"]


def ask(store: Any, rank: int, interface: str = "lo") -> str:
    """What a rank on one of two hosts hears, "" for nothing."""
    world = World(
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        node_rank=rank // 2,
        num_nodes=2,
    )
    try:
        deadline_s = time.monotonic() + 10
        check_reach(store, world, HOSTS, interface=interface, deadline_s=deadline_s)
    except RendezvousError as error:
        return str(error)
    return ""


def on_all(interface: str) -> list[str]:
    """What all four hear."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda rank: ask(store, rank, interface), range(4)))


def refused(*_: Any, **__: Any) -> socket.socket:
    raise TimeoutError("timed out")


def test_open_ports_are_no_news() -> None:
    assert on_all("lo") == [""] * 4


def test_all_hear_what_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach.socket, "create_connection", refused)
    said = set(on_all("lo"))
    assert len(said) == 1
    (message,) = said
    assert message.startswith("rank 0 on first cannot connect to rank 2 on second at 127.0.0.1:")
    assert "(timed out), a port that the system picked" in message


def test_who_serves_the_store_stays_until_all_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach.socket, "create_connection", refused)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        first, *others = [threads.submit(ask, store, rank) for rank in range(3)]
        said = {other.result() for other in others}
        assert not first.done()  # rank 3 has not asked yet
        said |= {ask(store, 3), first.result()}
    assert len(said) == 1
    assert "" not in said


def test_without_an_address_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reach.socket, "create_connection")
    assert on_all("no such interface") == [""] * 4
