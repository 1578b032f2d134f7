"""How the ranks find each other: a plan made from the environment, before anything is opened.

    kind    when                              what the session does
    none    one rank                          nothing
    given   address and port are known        rank 0 serves there (or the launching agent does)
    file    one host, nothing given           rank 0 binds a free port of the loopback and
                                              publishes it in a private file
    port    several hosts under srun, PALS    rank 0's host from the host list, a port worked out
            or Flux                           from the job id
    mpi     several hosts under an MPI        rank 0 binds, mpi4py broadcasts where

`file` and `mpi` bind first and publish then, so that nobody can take the port in between. `port`
cannot: all ranks must know it beforehand. It is 15000 + (job id + 97 x step id) mod 10000, below
the range the system gives out by itself; concurrent jobs differ, and `MASTER_PORT` overrules it.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradsync.errors import LaunchError
from gradsync.runtime.bounds import whole_number
from gradsync.runtime.hostlist import check_host, expand_hosts
from gradsync.runtime.launchers.reading import integer
from gradsync.runtime.proc import launcher_ancestor
from gradsync.runtime.resolve import Resolution

HAND_PORT = 29_500
"""Port when the ranks were started by hand and none is given; torch's own default."""

_JOB_VARIABLES: dict[str, tuple[str, ...]] = {
    # The transports key is random per mpirun (Open MPI 4); the namespace holds a pid (Open MPI 5).
    "openmpi": (
        "PMIX_NAMESPACE",
        "PMIX_SERVER_TMPDIR",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_precondition_transports",
    ),
    "pals": ("PBS_JOBID", "PALS_APID"),
    "flux": ("FLUX_URI", "FLUX_JOB_ID"),
    "srun": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
}
# Which of them make a job unique on its host; without these we ask the process tree.
_UNIQUE = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "pals": ("PALS_APID",),
    "flux": ("FLUX_JOB_ID",),
    "srun": ("SLURM_JOB_ID",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorPlan:
    """Where the ranks meet. The same on every rank of a job."""

    kind: Literal["none", "given", "file", "port", "mpi"]
    """How; see the table of this module."""
    address: str = ""
    """Host name or address of rank 0; "" where rank 0 publishes it."""
    port: int = 0
    """TCP port; 0 where rank 0 takes a free one and publishes it."""
    hosted_by_agent: bool = False
    """The store is served by the agent that started the ranks: rank 0 must not bind."""
    key: str = ""
    """Kind `file`: a word for file names, of this job and generation alone."""
    why: str = ""
    """Where it comes from, for people."""


def run_command(argv: Sequence[str]) -> str:
    """Output of a command; raises `OSError` or `subprocess.SubprocessError` (also after 5 s)."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout


def plan_coordinator(
    env: Mapping[str, str],
    resolution: Resolution,
    *,
    resolve_host: Callable[[str], object] = socket.gethostbyname,
    run: Callable[[Sequence[str]], str] = run_command,
    read_text: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
    ancestor: Callable[[], str] = launcher_ancestor,
) -> CoordinatorPlan:
    """Plan where the ranks meet; opens nothing.

    Args:
        env: environment, as from `gradsync.runtime.environ.snapshot`.
        resolution: what `resolve` said about `env`.
        resolve_host: raises `OSError` for a name that the system does not know.
        run: output of a command (an argv list).
        read_text: content of a file.
        ancestor: text that names the launching process on this host, equal on all its ranks.

    Raises:
        LaunchError: when there is no way to know rank 0's host, or a variable is malformed.
    """
    world = resolution.world
    addr = env.get("MASTER_ADDR", "").strip()
    given_port = _port(env)
    if addr and re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", addr) is None:
        raise LaunchError(f"MASTER_ADDR={addr[:80]!r} is not a host name or address")
    if addr and (given_port or world.is_distributed):
        port = given_port or _fallback_port(env, world.launcher)
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() == "True"
        return CoordinatorPlan(
            kind="given",
            address=addr,
            port=port,
            hosted_by_agent=agent and world.launcher == "torchrun",
            why="MASTER_ADDR and " + ("MASTER_PORT" if given_port else "the fallback port"),
        )
    if not world.is_distributed:
        return CoordinatorPlan(kind="none", why="one rank needs no coordinator")
    if world.one_host:
        return _plan_one_host(env, resolution, given_port, ancestor)
    # Without the local size, ranks may differ in whether they see several hosts: no broadcast.
    if world.launcher in ("openmpi", "mvapich2", "hydra") and resolution.trust_local:
        return CoordinatorPlan(kind="mpi", port=given_port, why="rank 0 tells all through mpi4py")
    host, source = _first_host(env, world.launcher, run, read_text)
    return CoordinatorPlan(
        kind="port",
        address=_reachable(host, world.launcher, resolve_host, run),
        port=given_port or _fallback_port(env, world.launcher),
        why=f"first host of {source}, port from " + ("MASTER_PORT" if given_port else "the job id"),
    )


def _plan_one_host(
    env: Mapping[str, str], resolution: Resolution, port: int, ancestor: Callable[[], str]
) -> CoordinatorPlan:
    launcher = resolution.world.launcher
    if port or launcher in ("env", "torchrun"):
        why = "one host, " + ("MASTER_PORT" if port else "torch's default port")
        return CoordinatorPlan(kind="given", address="127.0.0.1", port=port or HAND_PORT, why=why)
    key = job_key(env, launcher, ancestor)
    digest = hashlib.sha256(json.dumps([launcher, key, resolution.generation]).encode())
    return CoordinatorPlan(
        kind="file",
        address="127.0.0.1",
        key=f"gradsync-{digest.hexdigest()[:32]}",
        why="one host, rank 0 binds a free port and publishes it",
    )


def job_key(env: Mapping[str, str], launcher: str, ancestor: Callable[[], str]) -> list[str]:
    """A name that all ranks of this job on this host share, and no other job there.

    Taken from the launcher's own job variables; where it sets none (Hydra, MVAPICH2), from the
    process that started the ranks.
    """
    key = [f"{name}={env[name]}" for name in _JOB_VARIABLES.get(launcher, ()) if env.get(name)]
    if not any(env.get(name) for name in _UNIQUE.get(launcher, ())):
        key.append(f"process={ancestor()}")
    return key


def _port(env: Mapping[str, str]) -> int:
    """`MASTER_PORT`, or 0 when it is not set."""
    if not env.get("MASTER_PORT", "").strip():
        return 0
    port = integer(env, "MASTER_PORT")
    if not 1 <= port <= 65_535:
        raise LaunchError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return port


def _fallback_port(env: Mapping[str, str], launcher: str) -> int:
    """A port that all ranks work out alone; see the head of this module."""
    names = {"srun": "SLURM_JOB_ID", "pals": "PBS_JOBID", "flux": "FLUX_JOB_ID"}
    job = env.get(names.get(launcher, ""), "").strip()
    if not job:
        return HAND_PORT
    number = whole_number(job)
    step = env.get("SLURM_STEP_ID", "").strip() if launcher == "srun" else ""
    job_number = zlib.crc32(job.encode()) if number is None else number
    return 15_000 + (job_number + 97 * (whole_number(step) or 0)) % 10_000


def _first_host(
    env: Mapping[str, str],
    launcher: str,
    run: Callable[[Sequence[str]], str],
    read_text: Callable[[str], str],
) -> tuple[str, str]:
    """Name of the first host of the job, and the variable or command that told it."""
    if launcher == "srun":
        for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
            if env.get(name, "").strip():
                return expand_hosts(env[name].strip())[0], name
    if launcher == "pals" and env.get("PBS_NODEFILE"):
        try:
            lines = read_text(env["PBS_NODEFILE"]).split()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"PBS_NODEFILE cannot be read ({error}); set MASTER_ADDR") from error
        if lines:
            return check_host(lines[0]), "PBS_NODEFILE"
    if launcher == "flux" and env.get("FLUX_JOB_ID"):
        return _flux_host(env["FLUX_JOB_ID"].strip(), run), "flux job info"
    raise LaunchError(
        f"{launcher}: ranks run on several hosts and none says where rank 0 is; "
        "set MASTER_ADDR to its host name and MASTER_PORT to a free port there"
    )


def _flux_host(job: str, run: Callable[[Sequence[str]], str]) -> str:
    """First host of a Flux job, from its resource set (Flux RFC 20)."""
    if job.startswith("-"):
        raise LaunchError(f"FLUX_JOB_ID={job[:80]!r} is not a job id")
    try:
        resources = json.loads(run(["flux", "job", "info", job, "R"]))
        hosts = resources["execution"]["nodelist"]
        return expand_hosts(",".join(hosts))[0]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"flux cannot tell the hosts of job {job[:80]!r} ({error}); set MASTER_ADDR"
        ) from error


def _reachable(
    host: str,
    launcher: str,
    resolve_host: Callable[[str], object],
    run: Callable[[Sequence[str]], str],
) -> str:
    """`host` if the system knows the name, else the address that Slurm has for that node."""
    try:
        resolve_host(host)
    except OSError as unknown:
        if launcher == "srun":
            address = _slurm_address(host, run)
            if address:
                return address
        asked = ", and scontrol gives no address for it" if launcher == "srun" else ""
        raise LaunchError(
            f"rank 0's host {host!r} does not resolve ({unknown}){asked}; "
            "set MASTER_ADDR to an address of that host"
        ) from unknown
    return host


def _slurm_address(host: str, run: Callable[[Sequence[str]], str]) -> str:
    """`NodeAddr` of a Slurm node, "" when scontrol cannot tell."""
    try:
        shown = run(["scontrol", "show", "node", host])
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\bNodeAddr=([A-Za-z0-9._:-]{1,255})(?:\s|$)", shown)
    return match[1] if match else ""
