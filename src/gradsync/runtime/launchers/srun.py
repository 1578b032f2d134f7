"""Slurm: the tasks of a step that srun started, and how to tell them from everything else.

[Note: when SLURM_* means a rank]
Everything inside an allocation inherits SLURM_JOB_ID and SLURM_NTASKS; they say what was asked for,
not what this process is. Seen on Slurm 22.05:
- the shell of `sbatch` has SLURM_PROCID=0, SLURM_NTASKS=4 and no SLURM_STEP_ID;
- the shell of `salloc` has SLURM_NTASKS=4 and neither;
- a task of `srun` has SLURM_STEP_ID, SLURM_STEP_NUM_TASKS and SLURM_STEP_TASKS_PER_NODE, and
  SLURM_GTIDS lists the ranks on its own node;
- the daemons that `mpirun` starts through srun are tasks of a step too, and the MPI ranks inherit
  their variables: the reason why MPI rows come before this one.
Newer versions give the shells steps of their own, with reserved numbers from 0xfffffff0 on. And
`sbatch` called from within a step hands that step's variables to its shell: there SLURM_GTIDS is
of the shell (`0`) and no longer fits the number of tasks on the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.errors import LaunchError
from gradsync.runtime.bounds import whole_number
from gradsync.runtime.hostlist import expand_counts
from gradsync.runtime.launchers.reading import Reading, absent, complete, found, integer, partly

_FIRST_RESERVED_STEP = 0xFFFFFFF0
_NEEDED = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
)


def read_srun(env: Mapping[str, str]) -> Reading:
    """`SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID`.

    They count only in a step that srun started; see [Note: when SLURM_* means a rank].
    """
    step = env.get("SLURM_STEP_ID", "").strip()
    if not step:
        inside = bool(found(env, ("SLURM_JOB_ID",)))
        return absent("srun", *(("in a Slurm job, but not in a step",) if inside else ()))
    number = whole_number(step)
    if step.isdecimal() and number is None:
        raise LaunchError(f"SLURM_STEP_ID={step[:80]!r} is not a step's number; unset it")
    if number is None or number >= _FIRST_RESERVED_STEP:
        return absent("srun", f"SLURM_STEP_ID={step[:20]} is a shell's, not a step of srun")
    seen = {"SLURM_STEP_ID": step} | found(env, _NEEDED)
    if len(seen) <= len(_NEEDED):
        return partly("srun", seen, _NEEDED)
    return _read_step(env, seen)


def _read_step(env: Mapping[str, str], seen: dict[str, str]) -> Reading:
    tasks = expand_counts(seen["SLURM_STEP_TASKS_PER_NODE"])
    seen |= found(env, ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"))
    num_nodes = (
        integer(seen, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in seen else len(tasks)
    )
    node = integer(seen, "SLURM_NODEID") if "SLURM_NODEID" in seen else 0
    if len(tasks) > 1 and "SLURM_NODEID" not in seen:
        return partly("srun", seen, ("SLURM_NODEID",))
    world_size = integer(seen, "SLURM_STEP_NUM_TASKS")
    gtids = found(env, ("SLURM_GTIDS",))
    if gtids and 0 <= node < len(tasks) and len(gtids["SLURM_GTIDS"].split(",")) != tasks[node]:
        return absent("srun", "the step's variables were inherited from another job")
    if not 0 <= node < len(tasks) or len(tasks) != num_nodes or sum(tasks) != world_size:
        values = " ".join(f"{name}={value}" for name, value in seen.items())
        raise LaunchError(f"srun: the tasks per node do not fit the step, read from {values}")
    return complete(
        "srun",
        seen,
        rank=integer(seen, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=integer(seen, "SLURM_LOCALID"),
        local_world_size=tasks[node],
        node=(node, num_nodes),
    )


def tasks_without_step(env: Mapping[str, str]) -> int:
    """How many tasks the surrounding Slurm job asked for; 0 outside a job."""
    if not found(env, ("SLURM_JOB_ID",)):
        return 0
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if found(env, (name,)):
            return integer(env, name)
    return 0
