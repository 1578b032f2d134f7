"""How the ranks of a run find each other: act on a `CoordinatorPlan`, end with a shared store.

Rank 0 serves the store (or torchrun's agent does); all keys are prefixed by the restart
generation, because an agent's store outlives its workers and a new generation that reads the dead
one's addresses hangs (2 of 12 restarts came back without the prefix, 12 of 12 with it).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsync.errors import RendezvousError
from gradsync.runtime.coordinator import plan_coordinator
from gradsync.runtime.publish import publish_port, read_port
from gradsync.runtime.resolve import Resolution
from gradsync.runtime.store import LEFT, host_store, join_store, own_address, wait_until
from gradsync.world import World


class Meeting:
    """A shared store, where it is, and what has to be cleaned up afterwards.

    Args:
        rank: this rank.
        server: the `TCPStore` this rank serves, or None.
        client: this rank's connection to the store.
        address, port: where the store is served.
        generation: prefix of every key.
        hosted_by_agent: the launcher serves the store.
        note: file to remove once all ranks have joined.
    """

    def __init__(
        self,
        *,
        rank: int,
        server: Any,
        client: Any,
        address: str,
        port: int,
        generation: str,
        hosted_by_agent: bool,
        note: Path | None = None,
    ) -> None:
        self.address = address
        self.port = port
        self.hosted_by_agent = hosted_by_agent
        self._server = server
        self._client = client
        self._note = note
        self._prefix = f"gradsync/{generation}"
        # A store that outlives the session (torchrun's) still holds its keys when the same
        # processes open another one: each rank counts its own, and all count alike.
        session = self._prefixed(client).add(f"sessions/{rank}", 1)
        self._prefix += f"/{session}"
        self.store = self._prefixed(client)

    def second_connection(self, rank: int) -> Any:
        """A store connection of its own, for a thread: a blocked one must not block the other."""
        deadline_s = time.monotonic() + 10
        return self._prefixed(join_store(self.address, self.port, rank=rank, deadline_s=deadline_s))

    def everyone_is_here(self) -> None:
        """Remove the published port, which is not needed any more."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)
            self._note = None

    def say_farewell(self, world: World, timeout_s: float) -> None:
        """Leave last where this rank serves the store, or others would lose it too early.

        When a rank has failed, nobody need be waited for.
        """
        try:
            self.store.set(f"noticed/{world.rank}", LEFT)  # its heartbeat stops in good order
            self.store.add("farewell", 1)
            if self._server is not None:
                wait_until(
                    lambda: (
                        self.store.add("farewell", 0) >= world.world_size
                        or self.store.check(["failure"])
                    ),
                    time.monotonic() + timeout_s,
                )
        except RuntimeError:  # the server has gone already: there is no one to wait for
            return

    def torchrun_variables(self, world: World) -> dict[str, str]:
        """The variables torchrun would have set, for other libraries in this process."""
        return {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def close(self) -> None:
        """Drop the connections and, on the serving rank, the server."""
        self.everyone_is_here()
        self.store = self._client = self._server = None

    def _prefixed(self, store: Any) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(self._prefix, store)


def meet(env: Mapping[str, str], resolution: Resolution, *, deadline_s: float) -> Meeting:
    """Find the other ranks as the launcher allows.

    Args:
        env: environment variables.
        resolution: who we are.
        deadline_s: monotonic clock, seconds; nothing here waits beyond it.

    Raises:
        LaunchError: no way to find rank 0 is given.
        RendezvousError: rank 0 could not be reached in time, or its port is taken.
    """
    plan = plan_coordinator(env, resolution)
    world = resolution.world
    serves = world.is_main and not plan.hosted_by_agent
    server, note = None, None
    address, port = plan.address, plan.port
    if world.one_host and not plan.hosted_by_agent:
        address = "127.0.0.1"  # where rank 0 listens, whatever name the host was given
    if plan.kind == "mpi":
        server, address, port = _meet_by_mpi(world, plan.port)
    elif serves:
        server = host_store(address, port, one_host=world.one_host)
        port = server.port
        if plan.kind == "file":
            note = publish_port(plan.key, port)
    elif plan.kind == "file":
        port = read_port(plan.key, rank=world.rank, deadline_s=deadline_s)
    client = join_store(address, port, rank=world.rank, deadline_s=deadline_s)
    return Meeting(
        rank=world.rank,
        server=server,
        client=client,
        address=address,
        port=port,
        generation=resolution.generation,
        hosted_by_agent=plan.hosted_by_agent,
        note=note,
    )


def _no_way(world: World, problem: str) -> RendezvousError:
    """The error of a job over several MPI hosts that cannot use mpi4py."""
    given = {
        "openmpi": "-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<port>",
        "hydra": "-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <port>",
    }.get(world.launcher, "MASTER_ADDR=<host of rank 0> MASTER_PORT=<port>")
    return RendezvousError(
        f"rank {world.rank}: the ranks sit on several hosts, no coordinator is given, and "
        f"{problem}; install gradsync[mpi] (mpi4py), or pass {given}"
    )


def _first_line(said: object) -> str:
    return (str(said).splitlines() or [""])[0].strip(" \t\0")


def _meet_by_mpi(world: World, wanted_port: int) -> tuple[Any, str, int]:
    """Rank 0 binds (any free port for 0) and broadcasts where.

    As bytes: MPI's calls for objects would pickle them.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: no MPI library at all
        raise _no_way(world, f"mpi4py cannot be used ({_first_line(error)})") from None
    if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (world.rank, world.world_size):
        library = _first_line(MPI.Get_library_version()).partition(",")[0]
        raise _no_way(
            world,
            f"mpi4py found another MPI's library, {library}, which knows no other ranks; let "
            "MPI4PY_LIBMPI name this one's",
        )
    server, address, port = None, "", 0
    if world.is_main:
        address = own_address()
        server = host_store(address, wanted_port, one_host=False)
        port = server.port
    message = bytearray(struct.pack("!H64s", port, address.encode()))
    MPI.COMM_WORLD.Bcast([message, MPI.BYTE], root=0)
    port, name = struct.unpack("!H64s", message)
    return server, name.rstrip(b"\0").decode(), port
