"""The open sockets of this process, by its file descriptors; listeners in another one's network."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def listening() -> frozenset[str]:
    """Names of the sockets we listen on. (/proc/net/tcp would say it too, in 7 ms.)"""
    return frozenset(
        str(sock.getsockname())
        for _, sock in _each()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def listening_at(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports on which any process listens in the network namespace of `pid`."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc", str(pid), "net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            if state == "0A":  # LISTEN
                words = [
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                ]
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def connections() -> set[int]:
    """File descriptors of connected TCP sockets."""
    found = set()
    for number, sock in _each():
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            try:
                sock.getpeername()
            except OSError:  # not connected
                continue
            found.add(number)
    return found


def cut(number: int) -> None:
    """End the connection behind a descriptor: both sides then read its end. Closes nothing."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _each() -> Iterator[tuple[int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            yield int(name), copy
