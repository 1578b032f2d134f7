"""How the ranks find each other: a plan made from the environment, before anything is opened.

    kind    when                              what the session does
    none    one rank                          nothing
    given   address and port are known        rank 0 serves there (or the launching agent does)
    file    one host, nothing given           rank 0 binds a free port of the loopback and
                                              publishes it in a private file
    port    several hosts under srun          rank 0's host from the host list, a port worked out
                                              from the job id
    mpi     several hosts under an MPI        rank 0 binds, mpi4py broadcasts where

`file` and `mpi` bind first and then publish, so that no other process takes the port. `port`
cannot: all ranks must know it beforehand. It is 15000 + (job id + 97 x step id) mod 10000, below
the range the system assigns; concurrent jobs differ, and `MASTER_PORT` overrides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import psutil

from gradsync.errors import LaunchError
from gradsync.runtime.bounds import whole_number
from gradsync.runtime.launchers import integer
from gradsync.runtime.resolve import Resolution

HAND_PORT = 29_500
"""Port when the ranks were started by hand and none is given; torch's own default."""

_JOB_VARIABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # The transports key is random per mpirun (Open MPI 4); the namespace holds a pid (Open MPI 5).
    "openmpi": (
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        ("PMIX_SERVER_TMPDIR", "OMPI_MCA_orte_precondition_transports"),
    ),
    "pals": (("PALS_APID",), ()),
    "flux": (("FLUX_JOB_ID",), ()),
    "srun": (("SLURM_JOB_ID",), ("SLURM_CLUSTER_NAME", "SLURM_STEP_ID")),
}
"""Variables that each identify a job uniquely on its host; then others that help."""

_LAUNCHERS = (
    *("hydra_pmi_proxy", "mpiexec", "mpirun", "mpirun_rsh", "mpispawn", "orted"),
    *("palsd", "prte", "prted", "prterun"),
)
"""Names of processes that start ranks, cut to 15 characters as in the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorPlan:
    """Meeting place of the ranks. The same on every rank of a job."""

    kind: Literal["none", "given", "file", "port", "mpi"]  # how; see the table of this module
    address: str = ""  # host name or address of rank 0; "" if rank 0 publishes it
    port: int = 0  # TCP port; 0 if rank 0 takes a free one and publishes it
    hosted_by_agent: bool = False
    """The agent that started the ranks serves the store: rank 0 must not bind."""
    key: str = ""  # kind `file`: part of file names, unique to this job and generation
    why: str = ""  # the plan's source, for people


def launcher_ancestor() -> str:
    """Process id of the nearest ancestor that is an MPI launcher, else of the parent process.

    All ranks that one launcher started on a host get the same text; two launchers get different
    ones.
    """
    for each in psutil.Process().parents():
        with suppress(psutil.Error):  # it has ended
            if (name := each.name()).startswith(("mpiexec.", "mpirun.")) or name[:15] in _LAUNCHERS:
                return str(each.pid)
    return str(os.getppid())


_OUTPUT = partial(subprocess.check_output, stderr=subprocess.PIPE, text=True, timeout=5)


@dataclass(frozen=True, slots=True)
class System:
    """Queries that a plan may need beyond the environment."""

    resolve_host: Callable[[str], object] = socket.gethostbyname
    """Raises `OSError` for a name that the system does not know."""
    run: Callable[[Sequence[str]], str] = _OUTPUT
    """Output of a command; raises `OSError` or `subprocess.SubprocessError` (after 5 s too)."""
    ancestor: Callable[[], str] = launcher_ancestor
    """Names the launching process on this host, equal on all its ranks."""


def plan_coordinator(
    env: Mapping[str, str], resolution: Resolution, system: System | None = None
) -> CoordinatorPlan:
    """Plan where the ranks meet; opens nothing.

    Args:
        env: environment variables.
        resolution: the result of `resolve(env)`.
        system: used only if the environment does not suffice; default: this one.

    Raises:
        LaunchError: rank 0's host cannot be determined, or a variable is malformed.
    """
    system = system or System()
    world = resolution.world
    addr = env.get("MASTER_ADDR", "").strip()
    port = given_port(env)
    if addr and (port or world.is_distributed):
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() == "True"
        return CoordinatorPlan(
            kind="given",
            address=addr,
            port=port or _fallback_port(env, world.launcher),
            hosted_by_agent=agent and world.launcher == "torchrun",
            why="MASTER_ADDR and " + ("MASTER_PORT" if port else "the fallback port"),
        )
    if not world.is_distributed:
        return CoordinatorPlan(kind="none", why="one rank needs no coordinator")
    if world.one_host:
        return _plan_one_host(env, resolution, port, system)
    # Without the local size, ranks may disagree on whether there are several hosts: no broadcast.
    if world.launcher in ("openmpi", "mvapich2", "hydra") and resolution.reading.trust_local:
        return CoordinatorPlan(kind="mpi", port=port, why="rank 0 tells all through mpi4py")
    host, source = _first_host(env, world.launcher)
    return CoordinatorPlan(
        kind="port",
        address=_reachable(host, system),
        port=port or _fallback_port(env, world.launcher),
        why=f"first host of {source}, port from " + ("MASTER_PORT" if port else "the job id"),
    )


def _plan_one_host(
    env: Mapping[str, str], resolution: Resolution, port: int, system: System
) -> CoordinatorPlan:
    launcher = resolution.world.launcher
    if port or launcher in ("env", "torchrun"):
        why = "one host, " + ("MASTER_PORT" if port else "torch's default port")
        return CoordinatorPlan(kind="given", address="127.0.0.1", port=port or HAND_PORT, why=why)
    # A name that all ranks of this job on this host share, and no other job: the launcher's own job
    # variables; if it sets none (Hydra, MVAPICH2), the process that started the ranks.
    unique, others = _JOB_VARIABLES.get(launcher, ((), ()))
    key = [f"{name}={env[name]}" for name in (*unique, *others) if env.get(name)]
    if not any(env.get(name) for name in unique):
        key.append(f"process={system.ancestor()}")
    digest = hashlib.sha256(json.dumps([launcher, key, resolution.generation]).encode())
    return CoordinatorPlan(
        kind="file",
        address="127.0.0.1",
        key=f"gradsync-{digest.hexdigest()[:32]}",
        why="one host, rank 0 binds a free port and publishes it",
    )


def given_port(env: Mapping[str, str]) -> int:
    """`MASTER_PORT`, or 0 when it is not set."""
    if not env.get("MASTER_PORT", "").strip():
        return 0
    port = integer(env, "MASTER_PORT")
    if not 1 <= port <= 65_535:
        raise LaunchError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return port


def _fallback_port(env: Mapping[str, str], launcher: str) -> int:
    """A port that each rank computes alone; see the module docstring."""
    job = env.get("SLURM_JOB_ID", "").strip() if launcher == "srun" else ""
    if not job:
        return HAND_PORT
    number, step = whole_number(job), whole_number(env.get("SLURM_STEP_ID", "").strip())
    job_number = zlib.crc32(job.encode()) if number is None else number
    return 15_000 + (job_number + 97 * (step or 0)) % 10_000


def _first_host(env: Mapping[str, str], launcher: str) -> tuple[str, str]:
    """Name of the first host of the job, and the variable it came from."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if launcher == "srun" else ()
    for name in names:
        if text := env.get(name, "").strip():
            # Slurm's list, such as `n[01-03,7],m2`; containers often lack `scontrol` to expand it.
            host = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", re.split(r",(?![0-9,-]*\])", text)[0])
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", host) is None:
                raise LaunchError(f"{name}={text[:80]!r} is not a host list such as 'n[1-3],m7'")
            return host, name
    raise LaunchError(
        f"{launcher}: ranks run on several hosts and none says where rank 0 is; "
        "set MASTER_ADDR to its host name and MASTER_PORT to a free port there"
    )


def _reachable(host: str, system: System) -> str:
    """`host` if the system knows the name, else the address that Slurm has for that node."""
    try:
        system.resolve_host(host)
        return host
    except OSError as unknown:
        with suppress(OSError, subprocess.SubprocessError):
            shown = system.run(["scontrol", "show", "node", host])
            if match := re.search(r"\bNodeAddr=([A-Za-z0-9._:-]{1,255})(?:\s|$)", shown):
                return match[1]
        raise LaunchError(
            f"rank 0's host {host!r} does not resolve ({unknown}), and scontrol gives no address "
            "for it; set MASTER_ADDR to an address of that host"
        ) from unknown
