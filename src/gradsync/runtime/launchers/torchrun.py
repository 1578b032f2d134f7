"""torchrun, and the same variables set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.runtime.launchers.reading import (
    Reading,
    absent,
    complete,
    found,
    integer,
    partly,
    without_local,
)

_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_GROUP = ("GROUP_RANK", "GROUP_WORLD_SIZE")


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
    return without_local(name, env, seen, _OWN)


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
