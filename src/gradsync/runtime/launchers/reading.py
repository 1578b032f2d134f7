"""Readings of one launcher family's environment variables, and the helpers its parsers share."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.errors import LaunchError
from gradsync.world import World

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One row of the launcher table as found in an environment: complete, partly set or absent."""

    name: str
    """Launcher, one of the names that `World.launcher` may take."""
    world: World | None = None
    """The place it gives this process; None when the row is absent or partly set."""
    seen: tuple[tuple[str, str], ...] = ()
    """The variables it was read from, with their values."""
    missing: tuple[str, ...] = ()
    """The variables that are needed but not set; empty unless the row is partly set."""
    notes: tuple[str, ...] = ()
    """Why the row was read as it was, where that is not plain."""
    needs_hosts: bool = False
    """The hosts are a guess; complete the world with `gradsync.world.place`."""
    trust_local: bool = True
    """With `needs_hosts`: local rank and size are the launcher's own (`place(trust_local=)`)."""

    @property
    def complete(self) -> bool:
        """True when the row gives a world."""
        return self.world is not None

    @property
    def partly_set(self) -> bool:
        """True when some variables of the row are set and others that it needs are not."""
        return self.world is None and bool(self.missing)

    def says(self) -> str:
        """The row in words: `rank 1 of 4, local rank 1 of 2`, or what is missing."""
        if self.world is not None:
            world = self.world
            return (
                f"rank {world.rank} of {world.world_size}, "
                f"local rank {world.local_rank} of {world.local_world_size}"
            )
        if self.missing:
            return f"{listed(dict(self.seen))} without {' '.join(self.missing)}"
        return "; ".join(self.notes) or "not set"


def found(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables among `names` that are set; an empty value counts as unset."""
    return {name: env[name].strip() for name in names if env.get(name, "").strip()}


def listed(seen: Mapping[str, str]) -> str:
    """Variables and their values for a line of text, whatever is in them."""
    return " ".join(f"{name}={ascii(value[:80])[1:-1]}" for name, value in seen.items())


def integer(env: Mapping[str, str], name: str) -> int:
    """The variable `name` as an integer.

    Raises:
        LaunchError: when its value is not one.
    """
    value = env[name].strip()
    if _INTEGER.fullmatch(value) is None:
        raise LaunchError(f"{name}={value[:80]!r} is not an integer; correct it or unset it")
    return int(value)


def absent(name: str, *notes: str) -> Reading:
    """The reading of a row that does not apply."""
    return Reading(name=name, notes=notes)


def partly(name: str, seen: Mapping[str, str], needed: Sequence[str]) -> Reading:
    """The reading of a row of which only some variables are set."""
    missing = tuple(variable for variable in needed if variable not in seen)
    return Reading(name=name, seen=tuple(seen.items()), missing=missing)


def complete(
    name: str,
    seen: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node: tuple[int, int] | None = None,
    trust_local: bool = True,
    needs_hosts: bool | None = None,
) -> Reading:
    """The reading of a row that gives a world.

    Args:
        name: launcher.
        seen: the variables it was read from.
        node: node rank and number of nodes; None when the launcher does not tell. They are guessed
            then, with ranks in blocks of `local_world_size`, and marked so if there are several.
        trust_local: see `Reading.trust_local`.
        needs_hosts: see `Reading.needs_hosts`; by default, when nodes had to be guessed.

    Raises:
        LaunchError: when the numbers contradict each other; names the variables.
    """
    guessed = node is None and local_world_size != world_size
    if node is None:
        blocks = -(-world_size // max(local_world_size, 1))
        node = (min(rank // max(local_world_size, 1), max(blocks - 1, 0)), blocks)
    try:
        world = World(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node[0],
            num_nodes=node[1],
            launcher=name,
        )
    except LaunchError as error:
        raise LaunchError(f"{name}: {error}, read from {listed(seen)}") from error
    return Reading(
        name=name,
        world=world,
        seen=tuple(seen.items()),
        needs_hosts=guessed if needs_hosts is None else needs_hosts,
        trust_local=trust_local,
    )


def is_loopback(address: str) -> bool:
    """True for an address that never leaves this host: empty, localhost, 127.x.y.z, ::1."""
    if address in ("", "localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def without_local(
    name: str, env: Mapping[str, str], seen: Mapping[str, str], names: Sequence[str]
) -> Reading:
    """The reading of a row that lacks the local rank or size, or both.

    Without a coordinator on another host (`MASTER_ADDR`), all ranks share this host; with one, the
    reading needs the host names.

    Args:
        name: launcher.
        seen: the variables that are set, rank and world size among them.
        names: of rank, world size, local rank and local size.
    """
    rank, world_size = integer(seen, names[0]), integer(seen, names[1])
    local_rank = integer(seen, names[2]) if names[2] in seen else rank
    local_world_size = integer(seen, names[3]) if names[3] in seen else world_size
    one_host = (
        is_loopback(env.get("MASTER_ADDR", "").strip())
        and local_rank == rank
        and local_world_size == world_size
    )
    return complete(
        name,
        seen,
        rank=rank,
        world_size=world_size,
        # Until the hosts are known, the only numbers that cannot be wrong together.
        local_rank=rank if one_host else 0,
        local_world_size=world_size if one_host else 1,
        node=None if one_host else (rank, world_size),
        trust_local=one_host,
        needs_hosts=not one_host and world_size > 1,
    )
