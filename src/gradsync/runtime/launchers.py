"""Launcher variables as a table: environment mapping in, one `Reading` per family out.

    torchrun    TORCHELASTIC_RUN_ID; the same names set by hand are "env"
    openmpi     OMPI_COMM_WORLD_*
    pals        PALS_RANKID (HPE PALS, the `mpiexec` of PBS on Cray machines)
    flux        FLUX_TASK_RANK
    mvapich2    MV2_COMM_WORLD_*
    hydra       PMI_RANK with MPI_LOCALRANKID (MPICH, Intel MPI, MVAPICH 3)
    srun        SLURM_STEP_ID, for a step that srun started

`PARSERS` holds them in order of precedence: the first complete row wins.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gradsync.errors import LaunchError
from gradsync.runtime.bounds import MOST_NODES, whole_number
from gradsync.world import World

_COMM_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# Each family's variables: rank, world size, local rank, local world size.
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = tuple(f"OMPI_COMM_WORLD_{part}" for part in _COMM_WORLD)
_ROWS = {
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "mvapich2": tuple(f"MV2_COMM_WORLD_{part}" for part in _COMM_WORLD),
}
"""Families recognised by these variables alone; the local size may be missing."""
_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_CRAY_LOCAL = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

_PMI_OWNERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("flux", "FLUX_JOB_ID", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("pals", "PALS_RANKID", "PALS_RANKID", "PMI_SIZE"),
)
"""Managers whose PMI server sets PMI_RANK and PMI_SIZE: name, mark, their rank and size."""

_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One row of the launcher table as found in an environment: complete, partly set or absent."""

    name: str  # launcher, a value of `World.launcher`
    world: World | None = None
    """This process's place; None when the row is absent or partly set."""
    seen: tuple[tuple[str, str], ...] = ()  # the variables it was read from, with their values
    missing: tuple[str, ...] = ()
    """The variables that are needed but not set; empty unless the row is partly set."""
    note: str = ""  # why the row is absent, if not obvious
    needs_hosts: bool = False
    """The hosts are guessed; complete the world with `gradsync.world.place`."""
    trust_local: bool = True
    """With `needs_hosts`: local rank and size are the launcher's own (`place(trust_local=)`)."""

    def says(self) -> str:
        """The row in words: `rank 1 of 4, local rank 1 of 2`, or what is missing."""
        if self.world is not None:
            world = self.world
            return (
                f"rank {world.rank} of {world.world_size}, "
                f"local rank {world.local_rank} of {world.local_world_size}"
            )
        if self.missing:
            return f"{_listed(dict(self.seen))} without {' '.join(self.missing)}"
        return self.note or "not set"


def read_torchrun(env: Mapping[str, str]) -> Reading:
    """`RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`; the node from `GROUP_RANK GROUP_WORLD_SIZE`.

    If set by hand, without `TORCHELASTIC_RUN_ID`, the `LOCAL_*` variables may be missing.
    """
    group = _found(env, ("GROUP_RANK", "GROUP_WORLD_SIZE"))
    node = None
    if len(group) == 2:
        node = integer(env, "GROUP_RANK"), integer(env, "GROUP_WORLD_SIZE")
    if env.get("TORCHELASTIC_RUN_ID", "").strip():
        return _read("torchrun", env, _TORCH, mark="TORCHELASTIC_RUN_ID", node=node)
    return _read("env", env, _TORCH, needed=2, node=node)


def read_row(name: str, env: Mapping[str, str]) -> Reading:
    """A family of `_ROWS`."""
    if _found(env, _ROWS[name]).keys() <= {"PMI_SIZE"}:  # alone it is from Hydra
        return Reading(name=name)
    return _read(name, env, _ROWS[name], needed=3)


def read_hydra(env: Mapping[str, str]) -> Reading:
    """`PMI_RANK PMI_SIZE` with `MPI_LOCALRANKID MPI_LOCALNRANKS` (Cray: `PMI_LOCAL_RANK _SIZE`).

    srun, Flux and PALS serve PMI too and set the first two to their own rank and size. Without
    Hydra's local variables, the row belongs to them.
    """
    pmi = _found(env, _PMI)
    if not _found(env, _HYDRA_LOCAL):
        if not pmi:
            return Reading(name="hydra")
        for owner, mark, *numbers in _PMI_OWNERS:
            values = [env.get(number, "").strip() for number in numbers]
            if _found(env, (mark,)) and pmi.items() <= dict(zip(_PMI, values, strict=True)).items():
                return Reading(name="hydra", note=f"PMI_RANK and PMI_SIZE are {owner}'s")
        if _found(env, _CRAY_LOCAL):
            return _read("hydra", env, (*_PMI, *_CRAY_LOCAL))
    return _read("hydra", env, (*_PMI, *_HYDRA_LOCAL))


def read_srun(env: Mapping[str, str]) -> Reading:
    """`SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID`.

    They are valid only in a step that srun started.

    [Note: when SLURM_* means a rank] Every process in an allocation inherits SLURM_JOB_ID and
    SLURM_NTASKS; they hold the request, not this process's place. Seen on Slurm 22.05:
    - the shell of `sbatch` has SLURM_PROCID=0, SLURM_NTASKS=4 and no SLURM_STEP_ID;
    - the shell of `salloc` has SLURM_NTASKS=4 and neither;
    - a task of `srun` has SLURM_STEP_ID, SLURM_STEP_NUM_TASKS and SLURM_STEP_TASKS_PER_NODE, and
      SLURM_GTIDS lists the ranks on its own node;
    - the daemons that `mpirun` starts through srun are tasks of a step too, and the MPI ranks
      inherit their variables. Therefore MPI rows come before this one.
    Newer versions give the shells their own steps, with reserved numbers from 0xfffffff0 on. And
    `sbatch` called within a step passes that step's variables to its shell: there SLURM_GTIDS is
    the shell's (`0`) and does not match the number of tasks on the node.
    """
    step = env.get("SLURM_STEP_ID", "").strip()
    if not step:
        inside = _found(env, ("SLURM_JOB_ID",))
        return Reading(name="srun", note="in a Slurm job, but not in a step" if inside else "")
    number = whole_number(step)
    if number is None or number >= _FIRST_RESERVED_STEP:
        note = f"SLURM_STEP_ID={step[:20]} is a shell's, not a step of srun"
        return Reading(name="srun", note=note)
    seen = _found(env, ("SLURM_STEP_ID", *_SRUN, "SLURM_NODEID", "SLURM_STEP_NUM_NODES"))
    tasks = _expand_counts(seen.get(_SRUN[-1], ""))
    needed = (*_SRUN, "SLURM_NODEID") if len(tasks) > 1 else _SRUN
    if missing := tuple(name for name in needed if name not in seen):
        return Reading(name="srun", seen=tuple(seen.items()), missing=missing)
    node = integer(seen, "SLURM_NODEID") if "SLURM_NODEID" in seen else 0
    on_a_node = 0 <= node < len(tasks)
    gtids = env.get("SLURM_GTIDS", "").strip()
    if gtids and on_a_node and len(gtids.split(",")) != tasks[node]:
        return Reading(name="srun", note="the step's variables were inherited from another job")
    rank, world_size, local_rank = (integer(seen, name) for name in _SRUN[:3])
    counted = {"SLURM_STEP_NUM_NODES": str(len(tasks))} | seen
    fits = integer(counted, "SLURM_STEP_NUM_NODES") == len(tasks) and sum(tasks) == world_size
    if not (fits and on_a_node):
        raise LaunchError(
            f"srun: the tasks per node do not fit the step, read from {_listed(seen)}"
        )
    numbers = (rank, world_size, local_rank, tasks[node])
    return _complete("srun", seen, numbers, node=(node, len(tasks)))


PARSERS: tuple[Callable[[Mapping[str, str]], Reading], ...] = (
    read_torchrun,
    # Its NODE_RANK is not read: it counts processes on the node, not nodes.
    lambda env: _read("openmpi", env, _OPENMPI),
    *(partial(read_row, name) for name in _ROWS),
    read_hydra,
    read_srun,
)
"""Every family's parser, in order of precedence."""


def integer(env: Mapping[str, str], name: str) -> int:
    """The variable `name` as an integer."""
    value = env[name].strip()
    if re.fullmatch("[+-]?[0-9]{1,18}", value) is None:
        raise LaunchError(f"{name}={value[:80]!r} is not an integer; correct it or unset it")
    return int(value)


def is_loopback(address: str) -> bool:
    """True for an address that never leaves this host: empty, localhost, 127.x.y.z, ::1."""
    try:
        return address in ("", "localhost") or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _expand_counts(text: str) -> list[int]:
    """The numbers of Slurm's list such as `4(x2),3`: how many tasks run on each host."""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise LaunchError(f"{text[:80]!r} is not a list of task counts such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _found(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables among `names` that are set; an empty value counts as unset."""
    return {name: env[name].strip() for name in names if env.get(name, "").strip()}


def _listed(seen: Mapping[str, str]) -> str:
    """Variables and their values for a line of text; special characters are escaped."""
    return " ".join(f"{name}={ascii(value[:80])[1:-1]}" for name, value in seen.items())


def _read(
    name: str,
    env: Mapping[str, str],
    names: Sequence[str],
    *,
    mark: str = "",
    needed: int = 4,
    node: tuple[int, int] | None = None,
) -> Reading:
    """The row of a family with these variables, of which the first ones are `needed`.

    Without the local rank or size, all ranks share this host unless the coordinator is on another
    host (`MASTER_ADDR`); with one, the reading needs the host names.

    Args:
        names: rank, world size, local rank, and perhaps local size.
        mark: a variable whose presence already makes the row this family's.
        node: see `_complete`.
    """
    seen = _found(env, (mark, *names))
    if not seen:
        return Reading(name=name)
    if missing := tuple(variable for variable in names[:needed] if variable not in seen):
        return Reading(name=name, seen=tuple(seen.items()), missing=missing)
    rank, world_size = integer(seen, names[0]), integer(seen, names[1])
    local, size = [integer(seen, each) if each in seen else None for each in (*names, "")[2:4]]
    if local is not None and size is not None:
        return _complete(name, seen, (rank, world_size, local, size), node=node)
    here = is_loopback(env.get("MASTER_ADDR", "").strip())
    if here and local in (None, rank) and size in (None, world_size):
        return _complete(name, seen, (rank, world_size, rank, world_size))
    # Until the hosts are known, only local rank 0 of 1 is always consistent.
    numbers, node = (rank, world_size, 0, 1), (rank, world_size)
    return _complete(name, seen, numbers, node=node, trust_local=False)


def _complete(
    name: str,
    seen: Mapping[str, str],
    numbers: tuple[int, int, int, int],
    *,
    node: tuple[int, int] | None = None,
    trust_local: bool = True,
) -> Reading:
    """The reading of a row that gives a world.

    Args:
        numbers: rank, world size, local rank, local world size.
        node: node rank and number of nodes; None if the launcher does not set them. They are then
            guessed, with ranks in blocks of the local size, and marked so if there are several.

    Raises:
        LaunchError: the numbers contradict each other; names the variables.
    """
    rank, world_size, local_rank, local_world_size = numbers
    block = max(local_world_size, 1)
    blocks = -(-world_size // block)
    node_rank, num_nodes = node or (min(rank // block, max(blocks - 1, 0)), blocks)
    guessed = (node is None and local_world_size != world_size) or not trust_local
    try:
        world = World(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            launcher=name,
        )
    except LaunchError as error:
        raise LaunchError(f"{name}: {error}, read from {_listed(seen)}") from error
    return Reading(
        name=name,
        world=world,
        seen=tuple(seen.items()),
        needs_hosts=guessed and world_size > 1,
        trust_local=trust_local,
    )
