"""The rendezvous: the store, the published port, and ports between hosts tried before gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from gradsync.errors import RendezvousError
from gradsync.runtime import rendezvous
from gradsync.runtime.rendezvous import check_reach, publish_port, read_port
from gradsync.runtime.store import (
    Presence,
    SignedStore,
    check_in,
    host_store,
    join_store,
    wait_until,
)
from gradsync.world import World


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def listening_at(port: int) -> list[str]:
    """Addresses on which this process listens at `port`."""
    found = psutil.Process().net_connections(kind="inet")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def resolver(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """The system knows exactly these names (and plain addresses)."""

    def look_up(name: str) -> str:
        if name[0].isdigit():
            return name
        if name in names:
            return names[name]
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", look_up)


# -- serving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "a-name-nobody-asks-about"])
def test_one_host_listens_on_loopback_only(address: str) -> None:
    server = host_store(address, 0, one_host=True)
    assert server.port > 0
    assert listening_at(server.port) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        ("127.0.0.2", "127.0.0.2"),  # an address as it is given
        ("localhost", "127.0.0.1"),
        ("debian", "0.0.0.0"),  # a name that is loopback here is something else elsewhere
    ],
)
def test_several_hosts_open_the_one_interface(
    address: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver(monkeypatch, localhost="127.0.0.1", debian="127.0.1.1")
    server = host_store(address, 0, one_host=False)
    assert listening_at(server.port) == [listens]
    client = join_store("127.0.0.1" if listens == "0.0.0.0" else listens, server.port, **rank_1())
    client.set("key", "value")
    assert server.get("key") == b"value"


def rank_1() -> dict[str, Any]:
    return {"rank": 1, "deadline_s": soon(20.0)}


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = f"port {port} on 127.0.0.1 is already in use; set MASTER_PORT to a free port"
        with pytest.raises(RendezvousError, match=f"{message}, the same for all ranks$"):
            host_store("127.0.0.1", port, one_host=True)


def test_a_port_is_free_again_at_once() -> None:
    server = host_store("127.0.0.1", 0, one_host=True)
    port = server.port
    client = join_store("127.0.0.1", port, **rank_1())
    client.set("generation", "old")
    del server  # it closes the connection first: the system keeps the port's address for a minute
    assert wait_until(lambda: not listening_at(port), soon())
    del client
    again = host_store("127.0.0.1", port, one_host=True)
    assert again.port == port
    assert not again.check(["generation"])


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch)
    with pytest.raises(RendezvousError, match="coordinator's name 'nowhere' does not resolve"):
        host_store("nowhere", 0, one_host=False)


def test_an_address_of_another_host() -> None:
    message = f"rank 0 runs on {socket.gethostname()}, which does not own .*198.51.100.7"
    with pytest.raises(RendezvousError, match=message):  # TEST-NET-2
        host_store("198.51.100.7", 0, one_host=False)


# -- joining --------------------------------------------------------------------------------------


def test_nobody_answers() -> None:
    with socket.socket() as reserved:  # bound, not listening: the port stays closed
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(RendezvousError) as caught:
            join_store("127.0.0.1", port, rank=3, deadline_s=soon(0.3))
    assert 0.3 <= time.monotonic() - started < 5
    assert f"rank 3 could not reach the coordinator at 127.0.0.1:{port}" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert "MASTER_ADDR/MASTER_PORT" in str(caught.value)


def test_a_server_that_is_no_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own client would wait for ever for an answer."""
    over = threading.Event()
    monkeypatch.setattr("gradsync.runtime.store._tcp_store", lambda *_, **__: over.wait())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = f"rank 1: what answers at 127.0.0.1:{port} is no rendezvous store"
        with pytest.raises(RendezvousError, match=said):
            join_store("127.0.0.1", port, rank=1, deadline_s=soon(0.3))
    over.set()


def test_a_server_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    servers: list[Any] = []
    knock = socket.create_connection

    def knock_before_it_opens(*args: Any, **options: Any) -> socket.socket:
        if not servers:
            servers.append(host_store("127.0.0.1", port, one_host=True))
            raise ConnectionRefusedError(111, "Connection refused")
        return knock(*args, **options)

    monkeypatch.setattr(socket, "create_connection", knock_before_it_opens)
    client = join_store("127.0.0.1", port, rank=1, deadline_s=soon())
    assert servers
    client.set("key", "value")
    assert servers[0].get("key") == b"value"


# -- checking in ----------------------------------------------------------------------------------


TOKEN = b"a token"


def signed(store: Any) -> SignedStore:
    return SignedStore(store, TOKEN, "0/1")


def presence(rank: int) -> Presence:
    return Presence(host=f"h{rank // 2}", device_identity=f"GPU-{rank}", pid=100 + rank)


def test_everyone_learns_about_everyone_in_rank_order() -> None:
    server = host_store("127.0.0.1", 0, one_host=True)
    answers: dict[int, list[Presence]] = {}

    def rank_arrives(rank: int) -> None:
        client = join_store("127.0.0.1", server.port, rank=rank, deadline_s=soon())
        records = signed(client)
        answers[rank] = check_in(
            records, presence(rank), rank=rank, world_size=3, deadline_s=soon()
        )

    threads = [threading.Thread(target=rank_arrives, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        assert answers[rank] == [presence(0), presence(1), presence(2)]


@pytest.mark.parametrize(
    ("here", "world_size", "missing"),
    [
        ([0, 2], 4, r"rank 0 waited in vain for rank\(s\) 1, 3 of 4;"),
        ([0], 12, r"rank\(s\) 1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12;"),
    ],
)
def test_who_did_not_come_is_named(here: list[int], world_size: int, missing: str) -> None:
    shared = signed(dist.HashStore())
    for rank in here[1:]:
        shared.set(f"here/{rank}", "{}")
    with pytest.raises(RendezvousError, match=missing):
        check_in(shared, presence(0), rank=0, world_size=world_size, deadline_s=soon(0.05))


@pytest.mark.parametrize("said", ["{", "[]", '{"host": 1}'])
def test_a_presence_that_cannot_be_read_is_refused(said: str) -> None:
    shared = signed(dist.HashStore())
    shared.set("here/1", said)
    with pytest.raises(RendezvousError, match=r"what a rank announces cannot be read .*version"):
        check_in(shared, presence(0), rank=0, world_size=2, deadline_s=soon())


# -- publishing a port on one host ----------------------------------------------------------------


SECRET = b"0123456789abcdef" * 4


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which ports are published; all users may write there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_published_port_is_read(temporary: Path) -> None:
    note = publish_port("job-1", 4711, SECRET)
    assert read_port("job-1", rank=1, deadline_s=soon()) == (4711, SECRET)
    assert list(temporary.iterdir()) == [note]
    assert note.stat().st_mode & 0o777 == 0o600
    publish_port("job-1", 4712, SECRET)
    publish_port("job-2", 4713, SECRET)
    assert read_port("job-1", rank=1, deadline_s=soon()) == (4712, SECRET)
    assert len(list(temporary.iterdir())) == 2


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "note",
    [
        lambda: {"port": 1, "pid": gone(), "started": "1.0"},
        lambda: {"port": 1, "pid": gone(), "started": ""},
        lambda: {"port": 1, "pid": os.getpid(), "started": "1.0"},  # its number came again
    ],
    ids=["ended", "ended, never known", "reused"],
)
def test_what_a_dead_process_left_is_ignored(
    note: Callable[[], dict[str, Any]], temporary: Path
) -> None:
    content = {"token": SECRET.decode(), **note()}
    publish_port("job-1", 4711, SECRET).write_text(json.dumps(content))
    with pytest.raises(RendezvousError, match=r"rank 2 waited .* for rank 0 .*job-1-\*\.json"):
        read_port("job-1", rank=2, deadline_s=soon(0.05))
    publish_port("job-1", 4712, SECRET)  # and takes its place
    assert read_port("job-1", rank=2, deadline_s=soon()) == (4712, SECRET)


def test_a_store_that_dies_during_the_meeting() -> None:
    class Dead:
        def get_all(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RendezvousError, match=r"rank 0, which serves .* went away"):
        check_in(Dead(), presence(1), rank=1, world_size=2, deadline_s=soon())
    with pytest.raises(RendezvousError, match=r"the launcher, which serves .* went away"):
        check_in(Dead(), presence(1), rank=1, world_size=2, deadline_s=soon(), hosted_by_agent=True)


# -- whether hosts reach each other ---------------------------------------------------------------

HOSTS = ["first", "first", "second", "second"]


def ask(store: Any, rank: int, interface: str = "lo") -> str:
    """The error of a rank on one of two hosts, "" for none."""
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
    """The errors of all four."""
    store = signed(dist.HashStore())
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda rank: ask(store, rank, interface), range(4)))


def refused(*_: Any, **__: Any) -> socket.socket:
    raise TimeoutError("timed out")


@pytest.mark.parametrize("interface", ["lo", "no such interface"])
def test_open_ports_are_no_news(interface: str) -> None:
    """Without an address nothing is tried."""
    assert on_all(interface) == [""] * 4


def test_all_hear_what_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.socket, "create_connection", refused)
    said = set(on_all("lo"))
    assert len(said) == 1
    (message,) = said
    assert message.startswith("rank 0 on first cannot connect to rank 2 on second at 127.0.0.1:")
    assert "(timed out), a port that the system picked" in message


def test_who_serves_the_store_stays_until_all_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.socket, "create_connection", refused)
    store = signed(dist.HashStore())
    with ThreadPoolExecutor(3) as threads:
        first, *others = [threads.submit(ask, store, rank) for rank in range(3)]
        said = {other.result() for other in others}
        assert not first.done()  # rank 3 has not asked yet
        said |= {ask(store, 3), first.result()}
    assert len(said) == 1
    assert "" not in said
