"""Two hosts on one machine: network namespaces joined by a cable (a veth pair); needs root.

    gradsync-PID-0  10.83.0.1 veth0 ═══════ veth0 10.83.0.2  gradsync-PID-1

Each has a loopback of its own. They share everything else: processes see each other in /proc, and
`hostname` says the same on both.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "gradsync"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    address: str
    interface: str = "veth0"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make both and the cable; they go in the end, whatever happens."""
    _remove_those_of_dead_processes()
    first, second = (
        Host(f"{_PREFIX}-{os.getpid()}-{number}", f"10.83.0.{number + 1}") for number in (0, 1)
    )
    with ExitStack() as undo:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "delete", host.namespace)
        _ip(
            *("-netns", first.namespace, "link", "add", first.interface, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for host in (first, second):
            _ip("-netns", host.namespace, "address", "add", f"{host.address}/24", "dev", "veth0")
            for interface in ("lo", host.interface):
                _ip("-netns", host.namespace, "link", "set", interface, "up")
        yield first, second


def become_host(namespace: str) -> None:
    """Move this process into a network namespace, under a host name of its own: ranks on one host
    look at each other's processes, ranks on two must not."""
    enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(namespace)


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace; what it starts is there too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def ours() -> list[str]:
    """Namespaces that this process has made and not removed."""
    return [str(path) for path in _FOLDER.glob(f"{_PREFIX}-{os.getpid()}-*")]


def program(name: str) -> str | None:
    """Path of a program that may lie where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@functools.cache
def missing() -> list[str]:
    """Missing components, found out by trying."""
    if program("ip") is None:
        return ["ip"]
    try:
        with two_hosts():
            pass
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return [f"the right to make network namespaces ({said[-1] if said else error})"]
    return []


def _ip(*words: str, check: bool = True) -> None:
    argv = [program("ip") or "ip", *words]
    subprocess.run(argv, capture_output=True, check=check, timeout=10)


def _remove_those_of_dead_processes() -> None:
    """Remove what killed ones left. (Another run may be doing the same.) benchmarks/network.py
    removes its own, gradsync-bench-PID-*."""
    for path in _FOLDER.glob(f"{_PREFIX}-[0-9]*-*"):
        pid = path.name.split("-")[1]
        if not Path("/proc", pid).exists():
            _ip("netns", "delete", path.name, check=False)
