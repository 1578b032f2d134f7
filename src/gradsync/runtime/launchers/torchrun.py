"""torchrun, and the same variables set by hand."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from gradsync.runtime.launchers.reading import Reading, absent, complete, found, integer, partly

_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_GROUP = ("GROUP_RANK", "GROUP_WORLD_SIZE")


def is_loopback(address: str) -> bool:
    """True for an address that never leaves this host: empty, localhost, 127.x.y.z, ::1."""
    if address in ("", "localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def read_torchrun(env: Mapping[str, str]) -> Reading:
    """`RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`; the node from `GROUP_RANK GROUP_WORLD_SIZE`.

    The row is called torchrun when `TORCHELASTIC_RUN_ID` is there, env otherwise. By hand the
    `LOCAL_*` variables may be missing: without a coordinator on another host (`MASTER_ADDR`), all
    ranks share this host; with one, the reading needs the host names.
    """
    by_torchrun = bool(found(env, ("TORCHELASTIC_RUN_ID",)))
    name = "torchrun" if by_torchrun else "env"
    seen = found(env, _OWN)
    if by_torchrun:
        if len(seen) < len(_OWN):
            run_id = found(env, ("TORCHELASTIC_RUN_ID",))
            return partly(name, run_id | seen, _OWN)
        return _with_local(name, env, seen)
    if not seen:
        return absent(name)
    if "RANK" not in seen or "WORLD_SIZE" not in seen:
        return partly(name, seen, _OWN[:2])
    if len(seen) == len(_OWN):
        return _with_local(name, env, seen)
    return _without_local(name, env, seen)


def _with_local(name: str, env: Mapping[str, str], seen: dict[str, str]) -> Reading:
    group = found(env, _GROUP)
    node = (
        (integer(group, "GROUP_RANK"), integer(group, "GROUP_WORLD_SIZE"))
        if len(group) == len(_GROUP)
        else None
    )
    return complete(
        name,
        seen,
        rank=integer(seen, "RANK"),
        world_size=integer(seen, "WORLD_SIZE"),
        local_rank=integer(seen, "LOCAL_RANK"),
        local_world_size=integer(seen, "LOCAL_WORLD_SIZE"),
        node=node,
    )


def _without_local(name: str, env: Mapping[str, str], seen: dict[str, str]) -> Reading:
    """By hand, with `LOCAL_RANK` or `LOCAL_WORLD_SIZE` or both missing."""
    rank, world_size = integer(seen, "RANK"), integer(seen, "WORLD_SIZE")
    local_rank = integer(seen, "LOCAL_RANK") if "LOCAL_RANK" in seen else rank
    local_world_size = (
        integer(seen, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in seen else world_size
    )
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
