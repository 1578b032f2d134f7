"""The network interface by which other hosts reach this one, for gloo.

Left alone, gloo listens where the host's own name points to. On Debian, and in many containers,
that is the loopback: then ranks of several hosts cannot connect.
"""

from __future__ import annotations

import ipaddress
import socket

FAR = "192.0.2.1"
"""TEST-NET-1: an address of no host, behind the default route."""
_LOCAL = ("docker", "podman", "virbr", "cni")
"""Beginnings of names of interfaces that lead to containers and virtual machines of this host."""


def interface_towards(address: str) -> str:
    """Name of the interface by which this host talks to `address`, "" if that cannot be told.

    On the host that owns `address` it is the interface which has it. Its *name* may mean loopback
    there (Debian maps the own name to 127.0.1.1): then the default route's. Sends nothing.
    """
    import psutil

    own = source_towards(address)
    if own and ipaddress.ip_address(own).is_loopback:
        literal = address in (own, "localhost")
        own = "" if literal else source_towards(FAR)
    for name, addresses in psutil.net_if_addrs().items():
        if own and any(known.address == own for known in addresses):
            return name
    return ""


def address_of(interface: str) -> str:
    """IPv4 address of an interface of this host, "" if there is none."""
    import psutil

    known = psutil.net_if_addrs().get(interface, ())
    return next((each.address for each in known if each.family == socket.AF_INET), "")


def first_address() -> str:
    """IPv4 address of the first interface that leads to other hosts, "" if there is none."""
    for _, name in socket.if_nameindex():
        address = address_of(name)
        local = name.startswith(_LOCAL)
        if address and not local and not ipaddress.ip_address(address).is_loopback:
            return address
    return ""


def source_towards(address: str) -> str:
    """The address this host would send from to `address`, "" if no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram connect only looks up the route
            return probe.getsockname()[0]
        except OSError:
            return ""
