"""The rendezvous store: its socket bound by us, its peers waited for with names and a deadline.

Torch's `TCPStore` listens on every interface even for 127.0.0.1, and an address chosen before it
is bound may be taken by another. So rank 0 binds the socket itself (port 0: the system picks
a free one), hands it over by `master_listen_fd`, and publishes the port only then.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from gradsync.errors import RendezvousError

# How long one operation on a store that answers may take; connecting has its own deadline.
_OPERATION_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.02

LEFT = b"left"
"""Value of the key `noticed/RANK` once that rank has left in good order."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Message of a rank that arrives."""

    host: str
    device_identity: str
    pid: int
    stack_fd: int = -1
    """The file of this process that holds its stack on request; see `StackOnSignal`."""


def host_store(address: str, port: int, *, one_host: bool) -> Any:
    """Bind, listen, and serve a store; rank 0 calls it. The bound port is `store.port`.

    Args:
        address: name or IP under which the others will look for us.
        port: 0 for any free port.
        one_host: bind to loopback only.
    """
    bind_to = "127.0.0.1" if one_host else _bind_address(address)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind_to, port))
        listener.listen(512)
        bound = listener.getsockname()[1]
    except OSError as error:
        listener.close()
        raise RendezvousError(_bind_problem(error, address, port)) from None
    connect_to = "127.0.0.1" if bind_to == "0.0.0.0" else bind_to
    return _tcp_store(connect_to, bound, is_master=True, master_listen_fd=listener.detach())


def join_store(address: str, port: int, *, rank: int, deadline_s: float) -> Any:
    """Connect to the store rank 0 serves, trying until `deadline_s` (monotonic clock, seconds).

    Raises:
        RendezvousError: no answer in time.
    """
    # Knock with a plain socket first: torch's client logs a stack trace for every failed try.
    started = time.monotonic()
    problem = ""  # at least one try, however late it is
    while True:
        left = deadline_s - time.monotonic()
        if left <= 0 and problem:
            raise RendezvousError(
                f"rank {rank} could not reach the coordinator at {address}:{port} within "
                f"{time.monotonic() - started:.0f} s ({problem}); is rank 0 running, is "
                "MASTER_ADDR/MASTER_PORT right, and is the port open between the hosts?"
            )
        try:
            socket.create_connection((address, port), timeout=min(max(left, 0.1), 5.0)).close()
            break
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(_POLL_S)
    return _connect(address, port, rank=rank, deadline_s=deadline_s)


def _connect(address: str, port: int, *, rank: int, deadline_s: float) -> Any:
    """Torch's client, given up at the deadline: it waits for ever for a server that is no store."""
    outcome: list[Any] = []

    def connect() -> None:
        try:
            outcome.append(_tcp_store(address, port, is_master=False))
        except RuntimeError as error:  # torch's DistError is one
            outcome.append(error)

    thread = threading.Thread(target=connect, name="gradsync-connect", daemon=True)
    thread.start()
    thread.join(min(max(deadline_s - time.monotonic(), 1.0), threading.TIMEOUT_MAX))
    if not outcome or isinstance(outcome[0], RuntimeError):
        reason = str(outcome[0]).splitlines()[0] if outcome else "no sensible answer"
        raise RendezvousError(
            f"rank {rank}: what answers at {address}:{port} is no rendezvous store ({reason}); set "
            "MASTER_PORT to the port of rank 0's store"
        )
    return outcome[0]


def _tcp_store(address: str, port: int, **options: Any) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        address, port, None, timeout=_OPERATION_TIMEOUT, wait_for_workers=False, **options
    )


def check_in(
    store: Any,
    presence: Presence,
    *,
    rank: int,
    world_size: int,
    deadline_s: float,
    hosted_by_agent: bool = False,
) -> list[Presence]:
    """Announce this rank and wait for all others; returns every rank's presence in rank order.

    Raises:
        RendezvousError: naming the ranks that did not come.
    """
    keys = [f"here/{other}" for other in range(world_size)]
    try:
        store.set(f"here/{rank}", json.dumps(asdict(presence)))
        all_here = wait_until(lambda: store.check(keys), deadline_s)
        found = store.multi_get(keys) if all_here else []
        missing = [other for other in range(world_size) if not store.check([f"here/{other}"])]
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise RendezvousError(
            f"rank {rank}: {server_name(hosted_by_agent)}, which serves the rendezvous store, went "
            "away while the ranks met"
        ) from error
    if found:
        return [_read_presence(other, value) for other, value in enumerate(found)]
    named = ", ".join(map(str, missing[:8]))
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    raise RendezvousError(
        f"rank {rank} waited in vain for rank(s) {named} of {world_size}; they did not start, "
        "crashed on the way, or were given another coordinator"
    )


def _read_presence(rank: int, value: bytes) -> Presence:
    try:
        presence = Presence(**json.loads(value))
        kinds = type(presence.host), type(presence.pid), type(presence.stack_fd)
        if kinds != (str, int, int):
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        raise RendezvousError(
            f"what rank {rank} announces cannot be read ({value[:40]!r}); all ranks must run the "
            "same version of gradsync, and other jobs must have another MASTER_PORT"
        ) from None
    return presence


def server_name(hosted_by_agent: bool) -> str:
    """Description of the store's server, for messages."""
    return "the launcher" if hosted_by_agent else "rank 0"


def wait_until(holds: Callable[[], bool], deadline_s: float) -> bool:
    """Poll `holds` until it is true or the monotonic clock passes `deadline_s`."""
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _bind_address(address: str) -> str:
    """The interface to listen on, so that no other one is open.

    A *name* that means loopback here (Debian maps the own host name to 127.0.1.1) means another
    address on the other hosts: then, and only then, listen on all interfaces.
    """
    try:
        resolved = socket.gethostbyname(address)
    except OSError as error:
        raise RendezvousError(f"the coordinator's name {address!r} does not resolve") from error
    literal = address in (resolved, "localhost")
    if ipaddress.ip_address(resolved).is_loopback and not literal:
        return "0.0.0.0"
    return resolved


def _bind_problem(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {address} is already in use; set MASTER_PORT to a free port, the same "
            "for all ranks"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"rank 0 runs on {socket.gethostname()}, which does not own the coordinator's address "
            f"{address}; set MASTER_ADDR to rank 0's host"
        )
    return f"cannot listen on {address}:{port}: {error.strerror}"
