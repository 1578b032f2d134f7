"""The MPI launchers: Open MPI, MVAPICH2, and Hydra (MPICH, Intel MPI, MVAPICH 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradsync.runtime.launchers.reading import (
    Reading,
    absent,
    complete,
    found,
    integer,
    partly,
    without_local,
)

_COMM_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_CRAY_LOCAL = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

# Managers whose own PMI server sets PMI_RANK and PMI_SIZE to these very numbers.
_PMI_OWNERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("flux", "FLUX_JOB_ID", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("pals", "PALS_RANKID", "PALS_RANKID", "PMI_SIZE"),
)


def read_openmpi(env: Mapping[str, str]) -> Reading:
    """`OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}`.

    `OMPI_COMM_WORLD_NODE_RANK` is not read: it counts processes on the node, not nodes.
    """
    return _read("openmpi", env, [f"OMPI_COMM_WORLD_{part}" for part in _COMM_WORLD])


def read_mvapich2(env: Mapping[str, str]) -> Reading:
    """`MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}`; the last may be missing, as by hand."""
    names = [f"MV2_COMM_WORLD_{part}" for part in _COMM_WORLD]
    seen = found(env, names)
    if list(seen) == names[:3]:
        return without_local("mvapich2", env, seen, names)
    return _read("mvapich2", env, names)


def read_hydra(env: Mapping[str, str]) -> Reading:
    """`PMI_RANK PMI_SIZE` with `MPI_LOCALRANKID MPI_LOCALNRANKS` (Cray: `PMI_LOCAL_RANK _SIZE`).

    srun, Flux and PALS serve PMI too and set the first two to their own rank and size: without
    Hydra's local variables, the row is theirs.
    """
    local = found(env, _HYDRA_LOCAL)
    pmi = found(env, _PMI)
    if pmi and not local:
        owner = _pmi_owner(env, pmi)
        if owner:
            return absent("hydra", f"PMI_RANK and PMI_SIZE are {owner}'s")
    cray = not local and bool(found(env, _CRAY_LOCAL))
    if not pmi and not local:
        return absent("hydra")
    return _read("hydra", env, [*_PMI, *(_CRAY_LOCAL if cray else _HYDRA_LOCAL)])


def _pmi_owner(env: Mapping[str, str], pmi: Mapping[str, str]) -> str:
    """The manager whose own rank and size the `PMI_*` variables `pmi` repeat, or ""."""
    for owner, mark, rank, size in _PMI_OWNERS:
        theirs = {"PMI_RANK": env.get(rank, "").strip(), "PMI_SIZE": env.get(size, "").strip()}
        if found(env, (mark,)) and all(theirs[name] == value for name, value in pmi.items()):
            return owner
    return ""


def _read(name: str, env: Mapping[str, str], names: Sequence[str]) -> Reading:
    """Rank, size, local rank and local size from the variables `names`, in that order."""
    seen = found(env, names)
    if not seen:
        return absent(name)
    if len(seen) < len(names):
        return partly(name, seen, names)
    rank, world_size, local_rank, local_world_size = (integer(seen, each) for each in names)
    return complete(
        name,
        seen,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
