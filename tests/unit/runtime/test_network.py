"""Interfaces and own addresses; connections to other ranks, bounded, counted when they end."""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from gradsync.runtime import network
from gradsync.runtime.activity import Activity
from gradsync.runtime.network import PeerConnections, interface_towards, own_address
from gradsync.runtime.peers import Peers
from gradsync.runtime.store import LEFT, NOTICED, Presence, SignedStore, record_of

BOUND_MS = 7_000


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback passes for a network: 127.0.0.2 is another host."""
    monkeypatch.setattr(network, "_is_loopback", lambda _: False)


def pair_over_the_network() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        return near, server.accept()[0]


def of_gloo(*ends: socket.socket) -> None:
    """Mark them as gloo's are: with the timeout of their group."""
    for one in ends:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))


def bound_of(one: socket.socket) -> tuple[int, int]:
    return (
        one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


@pytest.fixture
def peers() -> PeerConnections:
    return PeerConnections(BOUND_MS / 1000)


@pytest.mark.usefixtures("far")
def test_what_leads_to_another_host_is_bounded(peers: PeerConnections) -> None:
    near, there = pair_over_the_network()
    with near, there:
        assert bound_of(near) == (0, 0)
        peers.learn()
        assert bound_of(near) == bound_of(there) == (1, BOUND_MS)
        later, other_end = pair_over_the_network()
        with later, other_end:
            of_gloo(later)
            peers.num_ended()
            assert bound_of(later) == (1, BOUND_MS)
            assert bound_of(other_end) == (0, 0)


@pytest.mark.usefixtures("far")
def test_nccls_connections_are_neither_bounded_nor_counted(peers: PeerConnections) -> None:
    near, there = pair_over_the_network()
    data, its_end = pair_over_the_network()
    with near, there, its_end:
        of_gloo(near, there)
        peers.learn(pairs=True)
        peers.learn()
        peers.num_ended()
        assert bound_of(near) == bound_of(there) == (1, BOUND_MS)
        assert bound_of(data) == bound_of(its_end) == (0, 0)
        data.close()
        assert peers.num_ended() == 0
        near.close()
        assert peers.num_ended() == 1


def test_gloos_connections_are_told_by_their_timeout(peers: PeerConnections) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        made = [
            ranks.submit(dist.ProcessGroupGloo, store, rank, 3, timedelta(seconds=60))
            for rank in range(3)
        ]
        groups = [each.result() for each in made]
    peers.learn(pairs=True)
    del made, groups  # and with them each rank's connections to two others
    assert peers.num_ended() == 6


@pytest.mark.usefixtures("far")
def test_connections_of_before_and_to_strangers_are_left_alone() -> None:
    before, its_end = pair_over_the_network()
    with before, its_end:
        peers = PeerConnections(7.0)
        peers.learn()
        peers.num_ended()
        stranger, strangers_end = pair_over_the_network()
        with stranger, strangers_end:
            peers.num_ended()
            for one in (before, stranger):
                assert bound_of(one) == (0, 0)


def test_ended_connections_are_counted(peers: PeerConnections) -> None:
    store, its_end = connected()
    pairs = [connected() for _ in range(2)]
    of_gloo(*pairs[0], *pairs[1])
    peers.learn(pairs=True)
    assert peers.num_ended() == 0
    store.close()
    its_end.close()
    assert peers.num_ended() == 0
    pairs[0][0].close()
    assert peers.num_ended() == 1
    for pair in pairs:
        for one in pair:
            one.close()
    assert peers.num_ended() == 4


def test_a_default_timeout_changes_nobodys_socket(peers: PeerConnections) -> None:
    near, there = connected()
    with near, there:
        socket.setdefaulttimeout(5.0)
        try:
            peers.learn()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(near.fileno())
        assert os.get_blocking(there.fileno())


class Ended:
    """Connections of which so many have ended."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num_ended(self) -> int:
        return self.number


def looks(ended: int, *, left: int, beats: tuple[int, int]) -> list[int]:
    """Ranks that rank 0 of 3 finds cut off in two looks; meanwhile ranks 1, 2 beat as told."""
    store = SignedStore(dist.HashStore(), b"", "")
    peers = Peers(store, rank=0, world_size=3, connections=Ended(ended))  # type: ignore
    for rank in range(left):
        store.set(f"noticed/{rank + 1}", LEFT)
    for now in ((1, 1), beats):
        for rank, beat in enumerate(now, 1):
            store.set(f"beat/{rank}", record_of(Activity(beat=beat)))
        found = peers.cut_off()
        assert found == [] or now is beats
    return found


@pytest.mark.parametrize(
    ("ended", "left", "beats", "found"),
    [
        (1, 0, (1, 9), [1]),
        (2, 0, (1, 1), [1, 2]),
        (0, 0, (1, 9), []),  # it computes with Python's lock held
        (1, 0, (7, 9), []),  # it has destroyed its group
        (1, 1, (1, 1), []),  # it left in good order
        (2, 1, (1, 1), [2]),
    ],
)
def test_an_ended_connection_and_a_heartbeat_that_stands_still_are_a_death(
    ended: int, left: int, beats: tuple[int, int], found: list[int]
) -> None:
    assert looks(ended, left=left, beats=beats) == found


@pytest.mark.parametrize(("state", "silent"), [("sleeping", []), ("stopped", [1])])
def test_a_neighbour_that_is_slow_to_say_what_it_saw_is_no_culprit(
    state: str, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda _: state)
    store = SignedStore(dist.HashStore(), b"", "")
    here = {1: Presence(socket.gethostname(), "", os.getpid())}
    peers = Peers(store, rank=0, world_size=2, processes=here)
    store.set("noticed/1", NOTICED)
    assert peers.silent_since(peers.beats()) == silent


# -- interfaces and addresses ---------------------------------------------------------------------


def test_loopback_itself_is_left_alone() -> None:
    assert interface_towards("127.0.0.1") == ""
    assert interface_towards("no such host.invalid") == ""


def test_a_name_that_means_loopback_here_means_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {"node1": "127.0.1.1", "192.0.2.1": "10.0.0.7", "node2": "10.0.0.7"}
    monkeypatch.setattr(network, "source_towards", sources.__getitem__)
    found = {"lo": [], "eth7": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert interface_towards("node1") == "eth7"
    assert interface_towards("node2") == "eth7"


def test_an_address_of_this_host_is_found() -> None:
    own = own_address()
    if own.startswith("127."):
        pytest.skip("this machine has no network")
    names = [
        n for n, known in psutil.net_if_addrs().items() if any(a.address == own for a in known)
    ]
    assert [interface_towards(own)] == names


def test_without_a_default_route_the_first_interface_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster's own network: the host's name may well mean the loopback."""
    known = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "ib0": "10.1.0.4", "ib1": "10.2.0.4"}
    addresses = {
        name: [SimpleNamespace(address=address, family=socket.AF_INET)]
        for name, address in known.items()
    }
    monkeypatch.setattr(network, "source_towards", lambda _: "")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(known, start=1)))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert own_address() == "10.1.0.4"
