"""Whether hosts reach each other on free ports, tried before gloo does.

A firewall between hosts often lets the coordinator's port through and nothing else. Gloo then waits
for its connections as long as a collective may take. So the first rank of each host opens a free
port, the first rank of the next host connects to it, and all ranks hear how it went.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from gradsync.errors import RendezvousError
from gradsync.runtime.interface import address_of
from gradsync.runtime.store import wait_until
from gradsync.world import World

_CONNECT_S = 10.0
_HEAR_S = 2.0
_HEARD = "reach/heard"


def check_reach(
    store: Any, world: World, hosts: Sequence[str], *, interface: str, deadline_s: float
) -> None:
    """Try it, on all ranks; does nothing where all ranks share one host.

    Args:
        store: that all ranks share.
        hosts: host name of each rank.
        interface: by which this host is to be reached.
        deadline_s: monotonic clock, seconds.

    Raises:
        RendezvousError: a host cannot reach another one; on all ranks.
    """
    if world.one_host:
        return
    doors = [f"reach/door/{node}" for node in range(world.num_nodes)]
    told = [f"reach/told/{node}" for node in range(world.num_nodes)]
    address = address_of(interface) if world.local_rank == 0 else ""
    with socket.socket() as door:
        if world.local_rank == 0:
            if address:
                door.bind((address, 0))
                door.listen()
            store.set(doors[world.node_rank], f"{world.rank} {address} {door.getsockname()[1]}")
            before = doors[world.node_rank - 1]
            if wait_until(lambda: store.check([before]), deadline_s):
                rank, there, port = store.get(before).decode().split(" ")
                problem = _problem(there, int(port), deadline_s)
                if problem:
                    problem = _message(world.rank, int(rank), hosts, f"{there}:{port}", problem)
                store.set(told[world.node_rank], problem)
        # The one who was to tell may be gone: then making the group says who is missing.
        wait_until(lambda: store.check(told), max(deadline_s, time.monotonic() + _CONNECT_S))
    problems = [store.get(key).decode() if store.check([key]) else "" for key in told]
    problem = next(filter(None, problems), "")
    if problem:
        store.add(_HEARD, 1)
        if world.is_main:  # it serves the store: it stays until the others know as much
            wait_until(lambda: store.add(_HEARD, 0) >= world.world_size, time.monotonic() + _HEAR_S)
        raise RendezvousError(problem)


def _problem(address: str, port: int, deadline_s: float) -> str:
    """Why a host cannot be reached, "" if it can or its interface has no address (IPv4)."""
    if not address:
        return ""
    patience_s = min(_CONNECT_S, max(deadline_s - time.monotonic(), 1.0))
    try:
        socket.create_connection((address, port), timeout=patience_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _message(rank: int, other: int, hosts: Sequence[str], where: str, problem: str) -> str:
    return (
        f"rank {rank} on {hosts[rank]} cannot connect to rank {other} on {hosts[other]} at "
        f"{where} ({problem}), a port that the system picked, though the coordinator's port "
        "answers; open the ports between the hosts, or name another network's interface by "
        "GLOO_SOCKET_IFNAME"
    )
