"""The rendezvous store: we bind its socket, and wait for its peers by name and with a deadline.

Torch's `TCPStore` listens on every interface even for 127.0.0.1, and another process may take an
address chosen before the bind. So rank 0 binds the socket itself (port 0: the system picks a free
one), passes it by `master_listen_fd`, and then publishes the port.

Any process at the port can list, read, write and delete: torch's store authenticates no client. So
ranks sign their records with a token that only they have (`SignedStore`).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableSet, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from gradsync.errors import LaunchError, RendezvousError

# Longest operation on a store that answers; connecting has its own deadline.
_OPERATION_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.02

NOTICED, SETTLED, HEARD, LEFT = b"noticed", b"settled", b"heard", b"left"
"""Records of the key `noticed/RANK`: that rank notices a failure, knows the failed rank, has read
the reason, or has left in good order. Its heartbeats end with the last three."""

TOKEN = "GRADSYNC_TOKEN"
"""Variable that gives ranks their job's token."""
_MAC_BYTES = 64
_LARGEST = 2**20
_NOTHING = b"-"


def token_of(env: Mapping[str, str]) -> bytes:
    """The token that a launcher or the user gives to all ranks; b"" for none.

    Raises:
        LaunchError: the token is too short to be a secret.
    """
    token = env.get(TOKEN, "").strip()
    if token and len(token) < 32:
        raise LaunchError(f"{TOKEN} must have at least 32 characters: $(openssl rand -hex 32)")
    return hashlib.sha256(token.encode()).hexdigest().encode() if token else b""


def record_of(said: Any) -> bytes:
    """The content of a record: the fields of a dataclass as JSON."""
    return json.dumps(asdict(said)).encode()


@dataclass(eq=False)
class SignedStore:
    """Records in a store that strangers can reach: a record that this job's ranks have not signed
    is ignored, and reported once.

    A record is HMAC-SHA256 with the token over its scope, its key and its text, as 64 digits,
    followed by the text. So a record cannot be made without the token, nor come from another key,
    generation or session. A stranger can still destroy records.

    Args:
        store: torch's store.
        token: the job's; with b"" there is no secret, and anyone can sign.
        scope: names this session of the job.
    """

    _store: Any
    _token: bytes
    scope: str
    _told: MutableSet[str] = field(default_factory=set)

    def over(self, store: Any) -> SignedStore:
        """The same records, over another connection."""
        return replace(self, _store=store)

    def set(self, key: str, text: str | bytes) -> None:
        """Write a record."""
        content = text.encode() if isinstance(text, str) else text
        self._store.set(key, self._mac(key, content) + content)

    def get(self, key: str) -> bytes | None:
        """The record of `key`; None for none. Never waits."""
        # Torch's `get` waits for a missing key; `compare_set` returns the expected value.
        return self._verified(key, self._store.compare_set(key, _NOTHING, _NOTHING))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The records of `keys`, in two messages; [] while any is missing."""
        values = self._store.multi_get(keys) if self._store.check(keys) else []
        found = list(map(self._verified, keys, values))
        return [text for text in found if text is not None] if None not in found else []

    def wait(self, key: str, patience: timedelta) -> bytes:
        """The record of `key`, once there is one; torch's error after `patience`."""
        until = time.monotonic() + patience.total_seconds()
        self._store.wait([key], patience)
        wait_until(lambda: self.get(key) is not None, until)  # a stranger may be first
        return self.get(key) or b""

    def claim(self, key: str, text: str | bytes) -> bytes:
        """The record of `key`, set to `text` if there is no record yet."""
        content = text.encode() if isinstance(text, str) else text
        mine = self._mac(key, content) + content
        found = self._verified(key, self._store.compare_set(key, b"", mine))
        if found is None:  # a stranger's
            self._store.set(key, mine)
        return content if found is None else found

    def name(self, purpose: str) -> str:
        """A name that only ranks of this session can compute."""
        return self._mac(f"/{purpose}", b"").decode()[:32]

    def _mac(self, key: str, text: bytes) -> bytes:
        said = json.dumps([self.scope, key]).encode() + text
        return hmac.digest(self._token, said, "sha256").hex().encode()

    def _verified(self, key: str, value: bytes) -> bytes | None:
        mac, text = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if len(value) <= _LARGEST and hmac.compare_digest(mac, self._mac(key, text)):
            return text
        if value not in (b"", _NOTHING) and not self._told:
            self._told.add(key)
            sys.stderr.write(
                f"gradsync: ignored {value[:40]!r} under {key!r} in the rendezvous store: no rank "
                "of this job has signed it. Another process reaches the store, or ranks were given "
                f"different {TOKEN}s\n"
            )
            sys.stderr.flush()
        return None


@dataclass(frozen=True, slots=True)
class Presence:
    """What a rank announces when it arrives."""

    host: str
    device_identity: str
    pid: int
    nonce: str = ""
    """Random in each session, so that an earlier session's record is not taken for this one's."""


def host_store(address: str, port: int, *, one_host: bool) -> Any:
    """Bind, listen, and serve a store; rank 0 calls it. The bound port is `store.port`.

    Args:
        address: name or IP that the others connect to.
        port: 0 for any free port.
        one_host: bind to loopback only.
    """
    bind_to = "127.0.0.1" if one_host else _bind_address(address)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind_to, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        causes = {
            errno.EADDRINUSE: f"port {port} on {address} is already in use; set MASTER_PORT to a "
            "free port, the same for all ranks",
            errno.EADDRNOTAVAIL: f"rank 0 runs on {socket.gethostname()}, which does not own the "
            f"coordinator's address {address}; set MASTER_ADDR to rank 0's host",
        }
        said = causes.get(error.errno or 0, f"cannot listen on {address}:{port}: {error.strerror}")
        raise RendezvousError(said) from None
    bound = listener.getsockname()[1]
    connect_to = "127.0.0.1" if bind_to == "0.0.0.0" else bind_to
    return _tcp_store(connect_to, bound, is_master=True, master_listen_fd=listener.detach())


def join_store(address: str, port: int, *, rank: int, deadline_s: float) -> Any:
    """Connect to rank 0's store, retrying until `deadline_s` (monotonic clock, seconds).

    Raises:
        RendezvousError: no answer in time.
    """
    # Try a plain socket first: torch's client logs a stack trace for every failed attempt.
    started = time.monotonic()
    problem = ""  # at least one try, even after the deadline
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
    outcome: list[Any] = []

    def connect() -> None:
        try:
            outcome.append(_tcp_store(address, port, is_master=False))
        except RuntimeError as error:  # torch's DistError is one
            outcome.append(error)

    # Torch's client never gives up on a server that is no store.
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
    store: SignedStore,
    presence: Presence,
    *,
    rank: int,
    world_size: int,
    deadline_s: float,
    hosted_by_agent: bool = False,
) -> list[Presence]:
    """Announce this rank and wait for all others; returns every rank's presence in rank order.

    Raises:
        RendezvousError: names the ranks that did not arrive.
    """
    keys = [f"here/{other}" for other in range(world_size)]
    mine = record_of(presence)
    found: list[bytes] = []

    def all_here() -> bool:
        found[:] = store.get_all(keys)
        if mine not in found:  # not yet, or a stranger overwrote it
            store.set(keys[rank], mine)
        return mine in found

    try:
        wait_until(all_here, deadline_s)
        told = found or [store.get(key) for key in keys]
    except RuntimeError as error:  # torch's DistNetworkError is one
        server = "the launcher" if hosted_by_agent else "rank 0"
        raise RendezvousError(
            f"rank {rank}: {server}, which serves the rendezvous store, went "
            "away while the ranks met"
        ) from error
    missing = [str(other) for other, value in enumerate(told) if value is None]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise RendezvousError(
            f"rank {rank} waited in vain for rank(s) {', '.join(missing[:8])}{more} of "
            f"{world_size}; they did not start, crashed on the way, or were given another "
            f"coordinator or {TOKEN}"
        )
    try:
        return [Presence(**json.loads(value or b"")) for value in told]
    except (ValueError, TypeError) as error:
        raise RendezvousError(
            f"what a rank announces cannot be read ({error}); all ranks must run the same version "
            "of gradsync, and other jobs must have another MASTER_PORT"
        ) from None


def wait_until(holds: Callable[[], bool], deadline_s: float) -> bool:
    """Poll `holds` until it is true or the monotonic clock passes `deadline_s`."""
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _bind_address(address: str) -> str:
    """The interface to listen on; the others stay closed.

    A *name* that means loopback here (Debian maps the own host name to 127.0.1.1) means another
    address on the other hosts. Then, and only then, listen on all interfaces.
    """
    try:
        resolved = socket.gethostbyname(address)
    except OSError as error:
        raise RendezvousError(f"the coordinator's name {address!r} does not resolve") from error
    literal = address in (resolved, "localhost")
    if ipaddress.ip_address(resolved).is_loopback and not literal:
        return "0.0.0.0"
    return resolved
