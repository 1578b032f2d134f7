"""HPE PALS, the `mpiexec` of PBS on Cray machines."""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.runtime.launchers.reading import Reading, absent, complete, found, integer, partly

_NEEDED = ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


def read_pals(env: Mapping[str, str]) -> Reading:
    """`PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE` (`PALS_SIZE` if PMI is off).

    Only these decide: srun on a Cray sets other `PALS_*` variables (`PALS_APID`, …).
    """
    seen = found(env, _NEEDED)
    if not seen:
        return absent("pals")
    size = found(env, ("PMI_SIZE",)) or found(env, ("PALS_SIZE",))
    seen |= size
    if len(seen) < len(_NEEDED) + 1:
        return partly("pals", seen, (*_NEEDED, *(() if size else ("PMI_SIZE",))))
    return complete(
        "pals",
        seen,
        rank=integer(seen, "PALS_RANKID"),
        world_size=integer(seen, next(iter(size))),
        local_rank=integer(seen, "PALS_LOCAL_RANKID"),
        local_world_size=integer(seen, "PALS_LOCAL_SIZE"),
    )
