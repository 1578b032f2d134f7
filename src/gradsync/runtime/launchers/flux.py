"""Flux, the resource manager of Livermore's machines."""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.errors import LaunchError
from gradsync.runtime.launchers.reading import Reading, absent, complete, found, integer, partly

_NEEDED = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID")


def read_flux(env: Mapping[str, str]) -> Reading:
    """`FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID`, and `FLUX_JOB_NNODES` for the hosts.

    Flux does not tell the local size: it is the job's on one host, otherwise an even share that
    must be completed from the host names.
    """
    seen = found(env, _NEEDED)
    if not seen:
        return absent("flux")
    if len(seen) < len(_NEEDED):
        return partly("flux", seen, _NEEDED)
    seen |= found(env, ("FLUX_JOB_NNODES",))
    num_nodes = integer(seen, "FLUX_JOB_NNODES") if "FLUX_JOB_NNODES" in seen else 1
    if num_nodes < 1:
        raise LaunchError(f"FLUX_JOB_NNODES={num_nodes} must be at least 1")
    rank, world_size = integer(seen, "FLUX_TASK_RANK"), integer(seen, "FLUX_JOB_SIZE")
    local_rank = integer(seen, "FLUX_TASK_LOCAL_ID")
    share = max(-(-world_size // num_nodes), local_rank + 1)
    return complete(
        "flux",
        seen,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=share,
        trust_local=num_nodes == 1,
        needs_hosts=num_nodes > 1,
        node=(min(rank // max(share, 1), num_nodes - 1), num_nodes),
    )
