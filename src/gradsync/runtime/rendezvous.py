"""How the ranks of a run find each other: from a `CoordinatorPlan` to a shared store.

Rank 0 serves the store (or torchrun's agent does). All keys are prefixed by the restart generation:
an agent's store outlives its workers, and a new generation that reads the dead one's addresses
hangs (2 of 12 restarts came back without the prefix, 12 of 12 with it). Our own records are signed
with the job's token (store.py), which reaches the ranks as follows:

    a launcher of ours, a job script, the user    by the variable GRADSYNC_TOKEN
    one host, by any other launcher               rank 0 draws it, and writes it into a private file
    several hosts under MPI                       rank 0 broadcasts it with its address
    several hosts otherwise                       not at all: then anyone can sign
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gradsync.errors import RendezvousError
from gradsync.runtime.coordinator import plan_coordinator
from gradsync.runtime.network import address_of, own_address
from gradsync.runtime.rejoin import NAMED, Lobby, ended_key
from gradsync.runtime.resolve import Resolution
from gradsync.runtime.store import LEFT, SignedStore, host_store, join_store, token_of, wait_until
from gradsync.world import World

_CONNECT_S = 10.0
_HEAR_S = 2.0
_LOOK_S = 1.0


class Meeting:
    """A shared store, its address, and what to clean up afterwards.

    `store` is for torch, which signs nothing; `records` are our own.

    Args:
        server: the `TCPStore` this rank serves, or None.
        client: this rank's connection to the store.
        address, port: where the store is served.
        token: the job's; every key's prefix comes from it and the generation.
        hosted_by_agent: the launcher serves the store.
        note: file to remove once all ranks have joined.
        rejoins: this process was started again, and joins the program's first session.
    """

    def __init__(
        self,
        world: World,
        *,
        server: Any,
        client: Any,
        address: str,
        port: int,
        token: bytes,
        generation: str,
        hosted_by_agent: bool,
        note: Path | None = None,
        rejoins: bool = False,
    ) -> None:
        import torch.distributed as dist

        self.address = address
        self.port = port
        self.hosted_by_agent = hosted_by_agent
        self._world = world
        self._server = server
        self._note = note
        # Unguessable: torch's own keys cannot be signed.
        job = f"gradsync/{SignedStore(client, token, generation).name('prefix')}"
        # A store that outlives the session (torchrun's) still holds its keys when the same
        # processes open another one. Each rank counts its own sessions, and all count alike.
        counter = f"sessions/{world.rank}"
        session = 1 if rejoins else dist.PrefixStore(job, client).add(counter, 1)
        self._session = self._prefix = f"{job}/{session}"
        self._client, self.scope = client, f"{generation}/{session}"
        self.store: Any = dist.PrefixStore(self._prefix, client)
        self.records = SignedStore(self.store, token, self.scope)
        lobby = SignedStore(self.store, token, f"{self.scope}/lobby")
        self.lobby = Lobby(lobby, self._num_named, self.has_ended)
        self._named, self._next_look_s = world.world_size, 0.0

    def learn_scope(self, scope: str) -> None:
        """Sign records of this session from now on with `scope`, which all of its ranks know."""
        self.scope = self.records.scope = scope

    def ballot(self, number: int) -> SignedStore:
        """The records by which survivors agree on the group after the `number`-th loss."""
        import torch.distributed as dist

        records = self.records.over(
            dist.PrefixStore(f"{self._session}/ballot-{number}", self._client)
        )
        records.scope = f"{self.scope}/ballot-{number}"
        return records

    def begin_group(self, number: int, world: World) -> None:
        """Use keys of its own for the group after the `number`-th loss."""
        import torch.distributed as dist

        self._prefix, self._world = f"{self._session}/{number}", world
        self.store = dist.PrefixStore(self._prefix, self._client)
        self.records = self.records.over(self.store)
        self.records.scope = f"{self.scope}/{number}"

    def tell_launcher(self, *keys: str, value: str = "1") -> None:
        """Set keys that the launchers read."""
        for key in keys:
            self._client.set(key, value)

    def _num_named(self) -> int:
        """How many numbers the launchers have given to ranks, or had a second ago."""
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._named = max(self._named, self._client.add(NAMED, 0))
        return self._named

    def has_ended(self, host: str, pid: int) -> bool:
        """Whether that process has, as it said, or the launcher on its host."""
        return bool(self._client.check([ended_key(host, pid)]))

    def connect(self) -> Any:
        """The store over another connection: a thread that waits on one blocks it."""
        import torch.distributed as dist

        rank, deadline_s = self._world.rank, time.monotonic() + 10
        client = join_store(self.address, self.port, rank=rank, deadline_s=deadline_s)
        return dist.PrefixStore(self._prefix, client)

    def everyone_is_here(self) -> None:
        """Remove the published port, which is no longer needed."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)
            self._note = None

    def say_farewell(self, timeout_s: float) -> None:
        """Leave last if this rank serves the store, or others would lose it too early.

        When a rank has failed, there is no need to wait.
        """
        here = [f"noticed/{rank}" for rank in range(self._world.world_size)]

        def all_left() -> bool:
            here[:] = [key for key in here if self.records.get(key) != LEFT]
            return not here or self.records.get("failure") is not None

        with suppress(RuntimeError):  # the server is gone: no rank to wait for
            self.records.set(here[self._world.rank], LEFT)  # its heartbeat stops in good order
            if self._server is not None:
                wait_until(all_left, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Drop the connections and, on the serving rank, the server."""
        self.everyone_is_here()
        self.store = self._server = self._client = None


def meet(
    env: Mapping[str, str], resolution: Resolution, *, deadline_s: float, rejoins: bool = False
) -> Meeting:
    """Find the other ranks as the launcher allows.

    Args:
        env: environment variables.
        resolution: this process's place.
        deadline_s: monotonic clock, seconds; nothing here waits beyond it.
        rejoins: see `Meeting`.

    Raises:
        LaunchError: no way to find rank 0 is given.
        RendezvousError: rank 0 is not reachable in time, or its port is taken.
    """
    plan = plan_coordinator(env, resolution)
    world, token = resolution.world, token_of(env)
    new_token = secrets.token_hex(32).encode()
    server, client, note = None, None, None
    address, port = plan.address, plan.port
    if world.one_host and not plan.hosted_by_agent:
        address = "127.0.0.1"  # rank 0 listens here, whatever the host is called
    if plan.kind == "mpi":
        server, address, port, token = _meet_by_mpi(world, plan.port, token or new_token)
    elif world.is_main and not plan.hosted_by_agent:
        server = host_store(address, port, one_host=world.one_host)
        port = server.port
    if plan.kind != "file":
        client = join_store(address, port, rank=world.rank, deadline_s=deadline_s)
    if plan.kind == "file" or (world.one_host and not token):
        key = plan.key or f"gradsync-{port}-{resolution.generation}"
        if world.is_main:
            token = token or new_token
            note = publish_port(key, port, token)
        else:
            port, token = read_port(key, rank=world.rank, deadline_s=deadline_s)
    return Meeting(
        world,
        server=server,
        client=client or join_store(address, port, rank=world.rank, deadline_s=deadline_s),
        address=address,
        port=port,
        token=token,
        generation=resolution.generation,
        hosted_by_agent=plan.hosted_by_agent,
        note=note,
        rejoins=rejoins,
    )


# -- several hosts under MPI ----------------------------------------------------------------------


def _meet_by_mpi(world: World, wanted_port: int, token: bytes) -> tuple[Any, str, int, bytes]:
    """Rank 0 binds (any free port for 0) and broadcasts address, port and `token`.

    Sends bytes: MPI's calls for objects would pickle.
    """
    ranks: Any = None
    try:
        from mpi4py import MPI

        problem, ranks = "", MPI.COMM_WORLD
        if (ranks.rank, ranks.size) != (world.rank, world.world_size):
            library = first_line(MPI.Get_library_version()).partition(",")[0]
            problem = (
                f"mpi4py found another MPI's library, {library}, which knows no other ranks; let "
                "MPI4PY_LIBMPI name this one's"
            )
    except (ImportError, RuntimeError) as error:  # the latter: no MPI library at all
        problem = f"mpi4py cannot be used ({first_line(error)})"
    if problem:
        given = {
            "openmpi": "-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<port>",
            "hydra": "-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <port>",
        }.get(world.launcher, "MASTER_ADDR=<host of rank 0> MASTER_PORT=<port>")
        raise RendezvousError(
            f"rank {world.rank}: the ranks sit on several hosts, no coordinator is given, and "
            f"{problem}; install gradsync[mpi] (mpi4py), or pass {given}"
        )
    server, address, port = None, "", 0
    if world.is_main:
        address = own_address()
        server = host_store(address, wanted_port, one_host=False)
        port = server.port
    message = bytearray(struct.pack("!H64s64s", port, address.encode(), token))
    ranks.Bcast(message, root=0)
    port, name, token = struct.unpack("!H64s64s", message)
    return server, name.rstrip(b"\0").decode(), port, token


def first_line(said: object) -> str:
    """The first line of a text, without blanks around it."""
    return (str(said).splitlines() or [""])[0].strip(" \t\0")


# -- one host: port and token in a private file ---------------------------------------------------
#
# Its name begins with the job's key, so that concurrent jobs cannot meet, and ends at random. In a
# temporary directory that all users share, another user can neither take the name beforehand nor
# make a file that belongs to this user, and readers accept no other. The file names the process
# that wrote it: a reader ignores the file of a dead process.


def publish_port(key: str, port: int, token: bytes) -> Path:
    """Write both for `read_port(key)`; the caller removes the file once all have joined."""
    # From a dead process of this job.
    for left in Path(tempfile.gettempdir()).glob(f"{key}-*.json"):
        with suppress(OSError):
            left.unlink()
    handle, path = tempfile.mkstemp(prefix=f"{key}-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        note = {"port": port, "token": token.decode(), "pid": os.getpid()}
        json.dump({**note, "started": _start_time(os.getpid())}, file)
    return Path(path)


def read_port(key: str, *, rank: int, deadline_s: float) -> tuple[int, bytes]:
    """Wait for rank 0's port and token until `deadline_s` (monotonic clock, seconds).

    Raises:
        RendezvousError: rank 0 published nothing in time.
    """
    found: list[tuple[int, bytes]] = []

    def published() -> bool:
        for path in Path(tempfile.gettempdir()).glob(f"{key}-*.json"):
            with suppress(OSError, ValueError, LookupError, TypeError):
                status = path.lstat()
                if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                    continue
                note = json.loads(path.read_bytes())
                if _start_time(note["pid"]) == note["started"] != "":
                    found.append((note["port"], note["token"].encode()))
        return bool(found)

    started = time.monotonic()
    if not wait_until(published, deadline_s):
        raise RendezvousError(
            f"rank {rank} waited {time.monotonic() - started:.0f} s for rank 0 on this host to "
            f"publish its port in {tempfile.gettempdir()}/{key}-*.json; rank 0 did not start, or "
            "runs with another TMPDIR or as another user: then give all ranks one GRADSYNC_TOKEN"
        )
    return found[0]


def _start_time(pid: int) -> str:
    """Start time of `pid`, "" without such process: tells a process from its successor."""
    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


# -- several hosts: are their ports open? ---------------------------------------------------------


def check_reach(
    store: SignedStore, world: World, hosts: Sequence[str], *, interface: str, deadline_s: float
) -> None:
    """Check that hosts reach each other on free ports, on all ranks, before gloo connects.

    A firewall between hosts often lets only the coordinator's port through. Gloo then waits for its
    connections for the timeout of a collective. So the first rank of each host opens a free port,
    the first rank of the next host connects to it, and all ranks get the result.

    Args:
        store: shared by all ranks.
        hosts: host name of each rank.
        interface: the interface to reach this host.
        deadline_s: monotonic clock, seconds.

    Raises:
        RendezvousError: a host cannot reach another one; on all ranks.
    """
    if world.one_host:
        return
    doors = [f"reach/door/{node}" for node in range(world.num_nodes)]
    told = [f"reach/told/{node}" for node in range(world.num_nodes)]
    with socket.socket() as door:
        if world.local_rank == 0:
            address = address_of(interface)
            if address:
                door.bind((address, 0))
                door.listen()
            said = f"{world.rank} {address} {door.getsockname()[1]}"
            store.set(doors[world.node_rank], said)
            before = doors[world.node_rank - 1]
            if wait_until(lambda: store.get(before) is not None, deadline_s):
                rank, there, port = (store.get(before) or b"").decode().split(" ")
                problem = ""
                patience_s = min(_CONNECT_S, max(deadline_s - time.monotonic(), 1.0))
                try:
                    if there:  # its interface has an address (IPv4)
                        socket.create_connection((there, int(port)), timeout=patience_s).close()
                except OSError as error:
                    problem = (
                        f"rank {world.rank} on {hosts[world.rank]} cannot connect to rank {rank} "
                        f"on {hosts[int(rank)]} at {there}:{port} ({error.strerror or error}), a "
                        "port that the system picked, though the coordinator's port answers; open "
                        "the ports between the hosts, or name another network's interface by "
                        "GLOO_SOCKET_IFNAME"
                    )
                store.set(told[world.node_rank], problem)
        # The reporting rank may be dead: then creating the group names the missing rank.
        wait_until(
            lambda: bool(store.get_all(told)), max(deadline_s, time.monotonic() + _CONNECT_S)
        )
    problems = [(store.get(key) or b"").decode(errors="replace") for key in told]
    if problem := next(filter(None, problems), ""):
        heard = [f"reach/heard/{rank}" for rank in range(world.world_size)]
        store.set(heard[world.rank], "")
        if world.is_main:  # the serving rank stays until the others know it too
            wait_until(lambda: bool(store.get_all(heard)), time.monotonic() + _HEAR_S)
        raise RendezvousError(problem)
