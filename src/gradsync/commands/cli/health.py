"""Findings of `gradsync doctor`: what this machine offers, and whether it is enough for a run.

`gather` queries the system and returns plain values by name; `judge` and its helpers use only
these. Only `gather` imports torch.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from gradsync import __version__
from gradsync.commands.plan.description import gb
from gradsync.commands.plan.measured import version_of
from gradsync.core.files import counted
from gradsync.errors import LaunchError
from gradsync.runtime.coordinator import given_port, run_command
from gradsync.runtime.machine import available_bytes, choose_threads, host_cores, total_bytes
from gradsync.runtime.network import interface_towards, own_address
from gradsync.runtime.rendezvous import first_line
from gradsync.runtime.store import TOKEN
from gradsync.world import World

Level = Literal["ok", "warning", "blocker"]
Facts = Mapping[str, Any]
_MIB, _GIB = 2**20, 2**30
_FAMILIES = {"Open MPI": "open ?mpi", "MPICH": "mpich|hydra|intel|mvapich"}
_ASK_MPI4PY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result, for people: what was seen, and what to do about it."""

    check: str
    level: Level
    said: str
    cure: str = ""  # "" if there is nothing to do


def grade(
    check: str, said: str, cure: str = "", *, blocker: object = False, warning: object = False
) -> Finding:
    """A finding of the most severe level that applies; a finding that is ok needs no cure."""
    level: Level = "blocker" if blocker else "warning" if warning else "ok"
    return Finding(check, level, said, "" if level == "ok" else cure)


def from_message(check: str, level: Level, message: object) -> Finding:
    """A finding from our error or warning, which says what happened, then what to do."""
    line = first_line(message).removesuffix(" What each launcher family says:")
    cut = min((line.find(end) for end in ("; ", ". ") if end in line), default=len(line))
    cure = line[cut + 2 :].removesuffix(".")
    return Finding(check, level, line[:cut], f"{cure[:1].lower()}{cure[1:]}")


def gather(env: Mapping[str, str], world: World, towards: str) -> dict[str, Any]:
    """Plain values about this machine for `judge`, as this rank sees it; `towards` is the address
    at which ranks of several hosts meet, or ""."""
    facts = _torch_facts(env) | _network_facts(env, world, towards) | _host_facts(world)
    alike = {
        **{"torch": facts["torch"], "gradsync": __version__, "python": platform.python_version()},
        "threads per rank": choose_threads(world.local_world_size),
        **{"GPUs": "some" if facts["gpus"] else "none", "open files": facts["files"][0]},
    }
    return facts | {"alike": alike}


def _torch_facts(env: Mapping[str, str]) -> dict[str, Any]:
    facts = {"torch": version_of("torch"), "visible": env.get("CUDA_VISIBLE_DEVICES")}
    try:
        import torch
        from torch.distributed import is_available, is_backend_available
    except (ImportError, OSError) as error:
        return facts | {"torch_problem": first_line(error), "gpus": 0}
    known = ("gloo", "nccl", "mpi", "ucc", "xccl") if is_available() else ()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip))
    return facts | {
        "torch_problem": "",
        "backends": [name for name in known if is_backend_available(name)],
        "gpus": gpus,
        "gpus_here": max(len(list(Path("/dev").glob("nvidia[0-9]*"))), gpus),
        "gpu_problem": first_line(said[0].message) if said else "no reason given",
        "built_for": next((f"{name} {number}" for name, number in built if number), ""),
    }


def _network_facts(env: Mapping[str, str], world: World, towards: str) -> dict[str, Any]:
    host, own, port, address, problem = socket.gethostname(), own_address(), 0, "", ""
    with suppress(OSError):
        address = socket.gethostbyname(host)
    interface = "lo" if sys.platform == "linux" else "lo0"
    if not (world.is_distributed and world.one_host):
        interface = interface_towards(towards or own)
    with suppress(LaunchError):  # the launcher check reports it
        port = 0 if world.is_distributed else given_port(env)  # ranks that meet bind it themselves
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1" if world.one_host else "", port))
        except OSError as error:
            problem = error.strerror or str(error)
    return {
        **{"host": host, "address": address, "own_address": own, "interface": interface},
        **{"named_interface": env.get("GLOO_SOCKET_IFNAME", "").strip(), "port": port},
        **{"interfaces": list(psutil.net_if_addrs()), "port_problem": problem},
        **{"one_host": world.one_host, "token": bool(env.get(TOKEN, "").strip())},
    }


def _host_facts(world: World) -> dict[str, Any]:
    def limit(name: int) -> list[float]:
        bounds = resource.getrlimit(name)
        return [math.inf if each == resource.RLIM_INFINITY else each for each in bounds]

    shm = Path("/dev/shm")
    return {
        **{"ranks": world.world_size, "ranks_here": world.local_world_size},
        "files": limit(resource.RLIMIT_NOFILE),
        **{"cores": host_cores(), "cores_machine": os.cpu_count() or 1},
        **{"free": available_bytes(), "memory": total_bytes()},
        "memory_machine": psutil.virtual_memory().total,
        "shm": shutil.disk_usage(shm).total if shm.is_dir() else 0,
        "mpi": _mpi_facts(world.launcher),
    }


def _mpi_facts(launcher: str) -> list[str] | None:
    """Launchers found, what mpi4py loads, and why it loads nothing; None without MPI. Uses separate
    processes: MPI may end the process that loads it."""
    if not version_of("mpi4py") or launcher not in ("python", "openmpi", "mvapich2", "hydra"):
        return None
    with suppress(OSError, subprocess.SubprocessError):
        alone = launcher == "python"
        starts = first_line(run_command(["mpirun", "--version"])) if alone else launcher
        try:
            return [starts, first_line(run_command([sys.executable, "-c", _ASK_MPI4PY])), ""]
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", "") or error)
            return [starts, "", said.strip().rpartition("\n")[2]]
    return None


def gather_disk(out: str) -> dict[str, Any]:
    """Write and remove 4 MiB in `out` ("": here) or its nearest parent; facts for `judge_disk`."""
    folder = Path(out or ".").absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    facts = {"folder": str(folder), "asked": bool(out), "problem": ""}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            data, started = os.urandom(4 * _MIB), time.monotonic()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            took_s = time.monotonic() - started
        return facts | {"free": shutil.disk_usage(folder).free, "fsync_s": took_s}
    except OSError as error:
        return facts | {"problem": error.strerror or str(error)}


def judge(facts: Facts) -> list[Finding]:
    """Findings about one rank's machine."""
    return [*judge_torch(facts), *judge_network(facts), *judge_limits(facts), *judge_host(facts)]


def judge_torch(facts: Facts) -> list[Finding]:
    """Whether torch can be imported and has the required backends; its GPUs."""
    cure = "install torch again, a build for this machine (pytorch.org)"
    if facts["torch_problem"]:
        said = f"{facts['torch'] or 'torch'} cannot be imported: {facts['torch_problem']}"
        return [grade("torch", said, cure, blocker=True)]
    backends = facts["backends"]
    needed = ("gloo", "nccl") if facts["gpus"] else ("gloo",)
    missing = [name for name in needed if name not in backends]
    said = f"{facts['torch']} with {', '.join(backends) or 'no backend'}"
    said += f", without {', '.join(missing)}" if missing else ""
    return [grade("torch", said, cure, blocker=missing), _judge_gpus(facts)]


def _judge_gpus(facts: Facts) -> Finding:
    here, gpus, named = facts["gpus_here"], facts["gpus"], facts["visible"]
    words = "" if named is None or named.strip() == "-1" else named.strip()
    wanted = len(words.split(",")) if words else 0
    blocker, cure = here and not gpus, ""
    if named is not None and not words:
        said, blocker = f"{here} here, hidden by CUDA_VISIBLE_DEVICES", False
    elif here and not facts["built_for"]:
        said, blocker = f"{here} here, but torch is built for the CPU", False
        cure = "install a CUDA build of torch (pytorch.org)"
    elif gpus < wanted:
        said = f"CUDA_VISIBLE_DEVICES={words[:80]} names {wanted}, usable: {gpus} of {here}"
        cure = "name GPUs that `nvidia-smi -L` lists, or unset it"
    elif blocker:
        said = f"torch for {facts['built_for']} can use none of {here}: {facts['gpu_problem']}"
        cure = "update the driver, or install a torch built for the CUDA that `nvidia-smi` shows"
    else:
        said = f"{gpus} of {here} usable, torch for {facts['built_for']}"
        said = said if gpus else "none, ranks compute on the CPU"
    return grade("GPUs", said, cure, blocker=blocker, warning=cure)


def judge_network(facts: Facts) -> list[Finding]:
    """The host's name, the interface for gloo, the port, write access to the rendezvous."""
    host, address, there = facts["host"], facts["address"], facts["interfaces"]
    said = f"{host} is {address}" if address else f"{host} does not resolve, as MPI and torch need"
    cure = f"add `{facts['own_address']} {host}` to /etc/hosts"
    found = [grade("host name", said, cure, warning=not address)]
    named, used = facts["named_interface"], facts["interface"]
    unknown = [name for name in named.split(",") if name and name not in there]
    said = named or used or "none leads to other hosts"
    if unknown:
        said = f"GLOO_SOCKET_IFNAME names {unknown[0][:40]}, which is not here"
    cure = f"let GLOO_SOCKET_IFNAME name one of {', '.join(there)}, or unset it"
    found.append(grade("interface", said, cure, blocker=unknown, warning=not (named or used)))
    problem = facts["port_problem"]
    said = f"{facts['port'] or 'one'} cannot be bound: {problem}"
    said = said if problem else f"{facts['port'] or 'a free one'} can be bound"
    cure = "set MASTER_PORT to a free port, the same for all ranks"
    found.append(grade("port", said, cure, blocker=problem))
    unsigned = not facts["one_host"] and not facts["token"]
    said = "given" if facts["token"] else "made by the ranks of one host"
    said = "none: whoever reaches the rendezvous can write into it" if unsigned else said
    cure = f"give all ranks one {TOKEN}, made by `openssl rand -hex 32`"
    return [*found, grade("job token", said, cure, warning=unsigned)]


def judge_limits(facts: Facts) -> list[Finding]:
    """Open files: a rank has a dozen, and a connection to each other rank in each group."""
    (soft, hard), ranks = facts["files"], facts["ranks"]
    needed = 32 + 2 * ranks
    said = f"{_count(soft)} of at most {_count(hard)}; some {needed} for {counted(ranks, 'rank')}"
    cure = f"`ulimit -n {min(hard, 65_536):.0f}` where ranks start"
    if hard < 1024:
        cure = "raise `nofile` in /etc/security/limits.conf, or the container's --ulimit"
    return [grade("open files", said, cure, blocker=soft < needed, warning=soft < 1024)]


def judge_host(facts: Facts) -> list[Finding]:
    """Cores, memory, MPI, and /dev/shm, which does not limit our shared buffers (memfds)."""
    ranks, cores, memory, free = (facts[n] for n in ("ranks_here", "cores", "memory", "free"))
    limit = ", this container's limit; the machine has "
    said = f"{cores} for {counted(ranks, 'rank')}"
    said += f"{limit}{facts['cores_machine']}" if cores < facts["cores_machine"] else ""
    cure = f"start at most {counted(cores, 'rank')} on this host"
    found = [grade("cores", said, cure, warning=ranks > cores)]
    said, machine = f"{gb(free)} free of {gb(memory)}", facts["memory_machine"]
    said += f"{limit}{gb(machine)}" if memory < machine else ""
    cure = "end other programs, raise the container's limit, or start fewer ranks here"
    found.append(grade("memory", said, cure, warning=free < ranks * _GIB))
    small = facts["shm"] < _GIB
    said = f"/dev/shm holds {gb(facts['shm'])}"
    said += ", little for NCCL and loaders' workers (gradsync needs none)" if small else ""
    cure = "`docker run --shm-size 8g`, or `mount -o remount,size=8G /dev/shm`"
    blocker = facts["gpus"] and facts["shm"] < 64 * _MIB
    found.append(grade("shared memory", said, cure, blocker=blocker, warning=small))
    if facts["mpi"] is not None:
        *names, problem = facts["mpi"]
        starts, loads = map(mpi_family, names)
        said = f"mpirun is {starts}, mpi4py loads {loads or f'no library ({problem[:120]})'}"
        cure = "let MPI4PY_LIBMPI name that MPI's libmpi.so; only ranks on several hosts need it"
        found.append(grade("MPI", said, cure, warning=starts != loads))
    return found


def mpi_family(said: str) -> str:
    """Open MPI, or MPICH for MPICH and its derivatives; else `said`."""
    return next((f for f in _FAMILIES if re.search(_FAMILIES[f], said.lower())), said)


def judge_disk(facts: Facts) -> Finding:
    """The folder that a run would write to: training waits until checkpoints are on disk."""
    cure = "name another folder by --out, here and for train"
    if facts["problem"]:
        said = f"{facts['folder']} cannot be written: {facts['problem']}"
        return grade("disk", said, cure, blocker=facts["asked"], warning=True)
    free, took_s = facts["free"], facts["fsync_s"]
    said = f"{facts['folder']} has {gb(free)} free; 4 MiB are on disk in {took_s:.2g} s"
    slow = took_s > 1
    return grade("disk", said, cure, blocker=free < 64 * _MIB, warning=slow or free < _GIB)


def judge_ranks(ranks: Sequence[Facts]) -> list[Finding]:
    """Findings about all ranks from what each reported: its `facts`, and each backend's sum:
    right, seconds of 8 bytes, bytes per second."""
    findings = _merge([judge(rank["facts"]) for rank in ranks])
    findings += judge_alike([rank["facts"]["alike"] for rank in ranks])
    cure = "name the fastest network's interface by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    for backend in set.intersection(*(set(rank["sums"]) for rank in ranks)):
        right, latencies, rates = zip(*(rank["sums"][backend] for rank in ranks), strict=True)
        latency_s, rate = max(latencies), min(rates)
        said = f"{latency_s * 1e6:,.0f} µs for 8 bytes, {rate / 1e9:.2g} GB/s for 16 MiB"
        wrong, slow = not all(right), latency_s > 0.01 or rate < 5e7
        said = f"a wrong sum; {said}" if wrong else said
        findings.append(grade(f"{backend} sum", said, cure, blocker=wrong, warning=slow))
    return findings


def judge_alike(values: Sequence[Facts]) -> list[Finding]:
    """One finding for each value that differs over ranks; it names the ranks of the minority."""
    findings = []
    for name in values[0]:
        seen = [str(each.get(name, "unknown")) for each in values]
        usual = Counter(seen).most_common(1)[0][0]
        odd = {v: [r for r, each in enumerate(seen) if each == v] for v in seen if v != usual}
        if odd:
            each = ", ".join(f"{_ranks(ranks)} {value}" for value, ranks in odd.items())
            said = f"{name} differs: {each}, the others {usual}"
            level: Level = "blocker" if name in ("torch", "gradsync", "GPUs") else "warning"
            findings.append(
                Finding("ranks alike", level, said, "start them all in one environment")
            )
    said = f"{len(values)} ranks, the same {', '.join(values[0])}"
    return findings or [Finding("ranks alike", "ok", said)]


def _merge(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """All ranks' findings as one list; a finding that only some ranks have names these."""
    merged: dict[tuple[str, Level, str], dict[int, str]] = {}
    troubled = {each.check for findings in found for each in findings if each.level != "ok"}
    for rank, findings in enumerate(found):
        for each in findings:
            if each.level != "ok" or (rank == 0 and each.check not in troubled):
                merged.setdefault((each.check, each.level, each.cure), {})[rank] = each.said
    for (_, level, _), said in merged.items():
        if level != "ok" and len(said) < len(found):
            said.update({rank: f"{_ranks(list(said))}: {each}" for rank, each in said.items()})
    return [
        Finding(c, level, next(iter(said.values())), u) for (c, level, u), said in merged.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _count(value: float) -> str:
    return "unlimited" if math.isinf(value) else f"{value:,.0f}"
