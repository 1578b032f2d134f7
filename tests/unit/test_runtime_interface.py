"""Which interface gloo is told to use."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from gradsync.runtime import interface, store
from gradsync.runtime.interface import interface_towards
from gradsync.runtime.store import own_address


def test_loopback_itself_is_left_alone() -> None:
    assert interface_towards("127.0.0.1") == ""
    assert interface_towards("no such host.invalid") == ""


def test_a_name_that_means_loopback_here_means_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {"node1": "127.0.1.1", "192.0.2.1": "10.0.0.7", "node2": "10.0.0.7"}
    monkeypatch.setattr(interface, "source_towards", sources.__getitem__)
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
    monkeypatch.setattr(store, "source_towards", lambda _: "")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(known, start=1)))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert own_address() == "10.1.0.4"
