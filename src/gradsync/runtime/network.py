"""This process's view of the network: interfaces, own addresses, and connections to other ranks.

By default gloo listens on the address of the host's name. On Debian, and in many containers, that
is the loopback: then ranks of several hosts cannot connect.

[Note: Silent hosts] A cut cable gives no signal. By default Linux gives up an unanswered message
after a quarter of an hour and never checks an idle connection (tcp(7), tcp_retries2 and
SO_KEEPALIVE); gloo waits for the whole timeout of the collective. `PeerConnections` makes the
system probe idle connections and end unanswered ones after a bound; a rank that waits on one then
gets "Connection timed out". The other host's kernel answers, so a rank that computes for long,
holds the GIL or is stopped in a debugger is not silent. One exception: a message larger than the
buffers, to a rank that is stopped while it arrives, counts as unanswered. NCCL's connections carry
such messages, and its ranks wait in GPU kernels that get no notice of a cut. So NCCL's are left
alone, and gloo's between the same hosts report a cut. One option tells them apart: gloo sets the
group's timeout on its sockets, NCCL sets none.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil

FAR = "192.0.2.1"
"""TEST-NET-1: an address without a host, reached by the default route."""
_LOCAL = ("docker", "podman", "virbr", "cni")
"""Name prefixes of interfaces to containers and virtual machines on this host."""
_OPEN_FILES = "/proc/self/fd"
_TOLERANCE_S = 0.02  # the kernel keeps whole ticks
Opened = tuple[int, str]
"""File descriptor and identity of a socket."""


def interface_towards(address: str) -> str:
    """Name of the interface by which this host reaches `address`, "" if unknown.

    On the host that owns `address` it is that address's interface. Its *name* may mean loopback
    there (Debian maps the own name to 127.0.1.1): then the default route's. Sends nothing.
    """
    own = source_towards(address)
    if own and ipaddress.ip_address(own).is_loopback:
        literal = address in (own, "localhost")
        own = "" if literal else source_towards(FAR)
    for name, addresses in psutil.net_if_addrs().items():
        if own and any(known.address == own for known in addresses):
            return name
    return ""


def address_of(interface: str) -> str:
    """IPv4 address of an interface of this host, "" if it has none."""
    known = psutil.net_if_addrs().get(interface, ())
    return next((each.address for each in known if each.family == socket.AF_INET), "")


def own_address() -> str:
    """The address by which other hosts reach this one: the source address of its default route.

    Without a default route (a cluster's own network): the address of the first interface that leads
    to other hosts.
    """
    if source := source_towards(FAR):
        return source
    for _, name in socket.if_nameindex():
        address = address_of(name)
        if address and not name.startswith(_LOCAL) and not _is_loopback(address):
            return address
    return "127.0.0.1"


def source_towards(address: str) -> str:
    """The source address for packets to `address`, "" if no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram connect only looks up the route
            return probe.getsockname()[0]
        except OSError:
            return ""


class PeerConnections:
    """Bounds the silence of other ranks' hosts; counts ended connections.

    Create it before the first connection. The connections belong to gloo and torch's store, which
    offer no such option, so they are found among this process's open files. Those within a host are
    only counted. Linux only; elsewhere nothing is bounded or counted. See [Note: Silent hosts].

    Args:
        silence_s: longest silence, seconds; at least 1.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._hosts: set[str] = set()
        self._pairs: set[Opened] = set()
        self._known = _open_sockets()

    def learn(self, *, pairs: bool = False) -> None:
        """Learn other ranks' hosts from connections made since the last call, and bound them: those
        of the rendezvous store, while there is no process group.

        With `pairs`, right after gloo has connected all pairs of ranks, gloo's connections only:
        the store's come and go, NCCL's are not bounded.
        """
        made = self._look(learn=True, gloo=pairs)
        if pairs:
            self._pairs = made

    def cut(self, timeout_s: float) -> None:
        """End all connections of gloo's groups with this timeout, so that operations on them fail
        here and on the other ranks. Their owner still closes them."""
        self._pairs = set()
        for opened in _open_sockets():
            with suppress(OSError), _borrowed(opened[0]) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and abs(_receive_timeout_s(one) - timeout_s) < _TOLERANCE_S:
                    one.shutdown(socket.SHUT_RDWR)

    def num_ended(self) -> int:
        """Number of connections to other ranks that have ended, on either side. Bounds gloo's new
        connections to known hosts: groups may be created later."""
        if self._hosts:
            self._look(learn=False, gloo=True)
        return len(self._pairs - _open_sockets()) if self._pairs else 0

    def _look(self, *, learn: bool, gloo: bool) -> set[Opened]:
        """Bound new connections, or only gloo's new ones; returns them."""
        now = _open_sockets()
        made = set()
        for opened in now - self._known:
            with suppress(OSError), _borrowed(opened[0]) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    here, there = one.getsockname()[0], one.getpeername()[0]
                    if not gloo or _receive_timeout_s(one):
                        made.add(opened)
                        if here != there and not _is_loopback(there):
                            if learn:
                                self._hosts.add(there)
                            if there in self._hosts:
                                _bound(one, self._silence_s)
                self._known.add(opened)
        self._known &= now
        return made


def _open_sockets() -> set[Opened]:
    if sys.platform != "linux":
        return set()
    found = set()
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed meanwhile
            identity = os.readlink(f"{_OPEN_FILES}/{name}")
            if identity.startswith("socket:"):
                found.add((int(name), identity))
    return found


@contextmanager
def _borrowed(number: int) -> Generator[socket.socket]:
    """The socket of a descriptor, left open; raises `OSError` if it was closed meanwhile."""
    blocking = os.get_blocking(number)
    with socket.socket(fileno=os.dup(number)) as copy:
        # With `socket.setdefaulttimeout` Python makes it non-blocking, for its owner too.
        if os.get_blocking(number) != blocking:
            os.set_blocking(number, blocking)
        yield copy


def _receive_timeout_s(connection: socket.socket) -> float:
    """The group's timeout if it is gloo's, 0 for others; see [Note: Silent hosts]."""
    length = struct.calcsize("ll")
    value = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, length)
    seconds, microseconds = struct.unpack("ll", value)
    return seconds + microseconds / 1e6


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback


def _bound(connection: socket.socket, silence_s: float) -> None:
    """End the connection if the other host is silent for `silence_s`, idle or not."""
    knock_s = max(1, int(silence_s / 5))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, knock_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, knock_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
