"""`gradsync doctor`: what this process sees of its launcher and machine, and whether it is enough.

--launcher and --hardware only describe, without torch; else findings follow. `gather` queries the
system and returns plain values by name, the `judge` functions use only these. Only `gather` and the
sum over ranks import torch.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import tyro

from gradsync import __version__
from gradsync.commands.arguments import parse
from gradsync.commands.plan.description import gb
from gradsync.commands.plan.hardware_file import dump_hardware, hardware_document
from gradsync.commands.plan.machine import detect_hardware
from gradsync.commands.plan.measured import version_of
from gradsync.commands.plan.report import hardware_lines
from gradsync.core.files import counted, printable
from gradsync.errors import GradsyncError, LaunchError, RunError
from gradsync.runtime import environ
from gradsync.runtime.coordinator import CoordinatorPlan, plan_coordinator
from gradsync.runtime.machine import busy, choose_threads, host_cores
from gradsync.runtime.network import interface_towards, own_address
from gradsync.runtime.rendezvous import first_line
from gradsync.runtime.resolve import Resolution, resolve
from gradsync.runtime.store import TOKEN
from gradsync.world import World

Level = Literal["ok", "warning", "blocker"]
Facts = Mapping[str, Any]
_LARGE = 16 * 2**20
_MEET_S, _ANSWER_S, _SILENCE_S = 20.0, 60.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Check whether this machine is ready: the launcher found and why, what the machine offers, and
    findings with their cures. Under a launcher the ranks meet, measure and are compared.

    Start it like training: `mpirun -np 2 gradsync doctor`. Exit code 1: not ready.
    """

    launcher: bool = False
    """Show the launcher part only."""
    hardware: bool = False
    """Show the hardware only, in the format of `gradsync plan --hardware FILE.yaml`."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document; not with --hardware."""


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


def run(argv: list[str]) -> int:
    """Run `gradsync doctor ARGV`; returns the exit code.

    Raises:
        LaunchError: with --launcher or --hardware, launcher variables are invalid.
        RunError: a rank other than the main one could not meet the others.
    """
    options = parse(DoctorOptions, argv, "doctor")
    env = environ.snapshot()
    if options.hardware:
        print(dump_hardware(detect_hardware(env)), end="")
        return 0
    try:
        resolution = resolve(env)
        try:
            plan = plan_coordinator(env, resolution)
        except LaunchError as error:
            raise LaunchError(f"{error}\n{resolution.explain()}") from error
    except LaunchError as error:
        if options.launcher:
            raise
        said = first_line(error).removesuffix(" What each launcher family says:")
        found = [Finding("launcher", "blocker", said), *judge(gather(env, World(), ""))]
        return _print(options, {"machine": describe_machine(1)}, str(error), found)
    document = {
        "world": asdict(resolution.world),
        "coordinator": asdict(plan),
        "generation": resolution.generation,
        "warnings": list(resolution.warnings),
    }
    text = launcher_text(resolution, plan)
    if options.launcher:
        print(json.dumps(document) if options.as_json else text)
        return 0

    def report(findings: Sequence[Finding]) -> int:
        hardware = detect_hardware(env)
        machine = describe_machine(resolution.world.local_world_size)
        rows = [f"{name.replace('_', ' '):<16}  {value}" for name, value in machine.items()]
        lines = [text]
        for title, part in (("machine", rows), ("hardware", hardware_lines(hardware))):
            lines += ["", title, *(f"  {line}" for line in part)]
        described = {"machine": machine, "hardware": hardware_document(hardware)}
        return _print(options, document | described, "\n".join(lines), findings)

    said = f"{resolution.world.launcher}, {resolution.reading.says()}; {plan.why}"
    warned = [Finding("launcher", "warning", each) for each in resolution.warnings]
    launcher = warned or [Finding("launcher", "ok", said)]
    towards = "" if resolution.world.one_host else plan.address
    return _diagnose(env, resolution.world, towards, lambda found: report([*launcher, *found]))


def _diagnose(
    env: dict[str, str], world: World, towards: str, report: Callable[[Sequence[Finding]], int]
) -> int:
    """Make rank 0 report findings about this rank or, with several ranks, about all of them."""
    facts = gather(env, world, towards)
    if not world.is_distributed:
        return report([*judge(facts), Finding("ranks", "ok", "one, nothing to compare")])
    if facts["torch_problem"]:
        return report(judge(facts)) if world.is_main else 1
    from gradsync.comm.process_group import ProcessGroupCommunicator
    from gradsync.comm.values import all_gather_json, all_gather_numbers
    from gradsync.runtime.session import Session
    from gradsync.runtime.session_options import SessionOptions

    session = Session(SessionOptions(rendezvous_timeout_s=_MEET_S, timeout_s=_ANSWER_S), env=env)
    try:
        with session as here:
            import torch.distributed as dist

            comm = ProcessGroupCommunicator(dist.group.WORLD)
            sums = {"gloo": _try_sum("cpu")}
            if here.device_name != "cpu":
                sums["nccl"] = _try_sum(here.device_name)
            findings = judge_ranks(all_gather_json(comm, {"facts": facts, "sums": sums}))
            code = report(findings) if world.is_main else 0
            # A launcher ends all ranks after a failure: rank 0 prints first, here and below.
            return max(all_gather_numbers(comm, code))
    except (GradsyncError, RuntimeError, OSError) as error:
        if world.is_main:
            return report([*judge(facts), Finding("ranks", "blocker", first_line(error))])
        time.sleep(_SILENCE_S)
        raise RunError(first_line(error)) from error


def _try_sum(device: str) -> tuple[bool, float, float]:
    """All-reduce known values: whether it is right, seconds of 8 bytes, bytes per second."""
    import torch
    import torch.distributed as dist

    size, right, fastest_s = dist.get_world_size(), True, []
    for length, count in ((1, 20), (_LARGE // 8, 4)):
        times = []
        for _ in range(count):
            data = torch.full((length,), dist.get_rank() + 1.0, dtype=torch.float64, device=device)
            right &= data[0].item() == dist.get_rank() + 1  # waits for the device
            started = time.perf_counter()
            dist.all_reduce(data)
            right &= data[0].item() == size * (size + 1) / 2
            times.append(time.perf_counter() - started)
            right &= bool((data == size * (size + 1) / 2).all())
        fastest_s.append(min(times))
    return right, fastest_s[0], _LARGE / fastest_s[1]


def _print(options: DoctorOptions, document: Facts, text: str, found: Sequence[Finding]) -> int:
    """Print the document or the text with the findings; returns the exit code."""
    lines = [text, "", "findings"]
    for each in found:
        cure = f"; {each.cure}" if each.cure else ""
        lines.append(printable(f"  {each.level:<7}  {each.check:<13}  {each.said}{cure}", kept=""))
    counts = Counter(each.level for each in found)
    ready = not counts["blocker"]
    numbers = ", ".join(counted(counts[each], each) for each in ("blocker", "warning"))
    lines += ["", f"verdict: {'ready' if ready else 'not ready'}, {numbers}"]
    whole = {**document, "findings": [asdict(each) for each in found], "ready": ready}
    print(json.dumps(whole) if options.as_json else "\n".join(lines), flush=True)
    return int(not ready)


def launcher_text(resolution: Resolution, plan: CoordinatorPlan) -> str:
    """The launcher part, for people."""
    where = f" {plan.address}:{plan.port or 'free port'}" if plan.address else ""
    lines = [
        "launcher rows, in the order in which they count",
        resolution.explain(),
        "",
        f"world        {resolution.world.describe().partition(' device=')[0]}",  # not known yet
        f"coordinator  {plan.kind}{where} ({plan.why})",
        f"generation   {resolution.generation}",
    ]
    if resolution.reading.needs_hosts:
        lines.append("hosts        not told by the launcher; ranks exchange their host names")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in resolution.warnings)])


def describe_machine(local_world_size: int) -> dict[str, str | int | float]:
    """Versions, cores and memory, without importing torch.

    `cores` are those this process may use; `threads_per_rank` is what a session would pin.
    """
    return {
        "python": platform.python_version(),
        "gradsync": version_of("gradsync") or "not installed",
        "torch": version_of("torch") or "not installed",
        "cores": choose_threads(1),
        "threads_per_rank": choose_threads(local_world_size),
        "memory": gb(psutil.virtual_memory().total),
    }


# -- what is there --------------------------------------------------------------------------------


def gather(env: Mapping[str, str], world: World, towards: str) -> dict[str, Any]:
    """Plain values about this machine for `judge`, as this rank sees it; `towards` is the address
    at which ranks of several hosts meet, or ""."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    if not (world.is_distributed and world.one_host):
        interface = interface_towards(towards or own_address())
    facts = _torch_facts(env) | {
        "interface": interface,
        "named_interface": env.get("GLOO_SOCKET_IFNAME", "").strip(),
        "interfaces": list(psutil.net_if_addrs()),
        "one_host": world.one_host,
        "token": bool(env.get(TOKEN, "").strip()),
        "ranks_here": world.local_world_size,
        "cores": host_cores(),
        "load": os.getloadavg()[0],
    }
    alike = {
        "torch": facts["torch"],
        "gradsync": __version__,
        "python": platform.python_version(),
        "GPUs": "some" if facts["gpus"] else "none",
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


# -- whether it is enough -------------------------------------------------------------------------


def judge(facts: Facts) -> list[Finding]:
    """Findings about one rank's machine."""
    cure = "install torch again, a build for this machine (pytorch.org)"
    if facts["torch_problem"]:
        said = f"{facts['torch'] or 'torch'} cannot be imported: {facts['torch_problem']}"
        return [grade("torch", said, cure, blocker=True), *_judge_host(facts)]
    backends = facts["backends"]
    needed = ("gloo", "nccl") if facts["gpus"] else ("gloo",)
    missing = [name for name in needed if name not in backends]
    said = f"{facts['torch']} with {', '.join(backends) or 'no backend'}"
    said += f", without {', '.join(missing)}" if missing else ""
    torch = grade("torch", said, cure, blocker=missing)
    return [torch, _judge_gpus(facts), *_judge_host(facts)]


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


def _judge_host(facts: Facts) -> list[Finding]:
    """The interface for gloo, write access to the rendezvous, cores."""
    named, used, there = facts["named_interface"], facts["interface"], facts["interfaces"]
    unknown = [name for name in named.split(",") if name and name not in there]
    said = named or used or "none leads to other hosts"
    if unknown:
        said = f"GLOO_SOCKET_IFNAME names {unknown[0][:40]}, which is not here"
    cure = f"let GLOO_SOCKET_IFNAME name one of {', '.join(there)}, or unset it"
    found = [grade("interface", said, cure, blocker=unknown, warning=not (named or used))]
    unsigned = not facts["one_host"] and not facts["token"]
    said = "given" if facts["token"] else "made by the ranks of one host"
    said = "none: whoever reaches the rendezvous can write into it" if unsigned else said
    cure = f"give all ranks one {TOKEN}, made by `openssl rand -hex 32`"
    found.append(grade("job token", said, cure, warning=unsigned))
    ranks, cores = facts["ranks_here"], facts["cores"]
    said = f"{cores} for {counted(ranks, 'rank')}"
    cure = f"start at most {counted(cores, 'rank')} on this host"
    found.append(grade("cores", said, cure, warning=ranks > cores))
    if other := busy(facts["load"], cores):
        found.append(grade("load", other, "measure when nothing else runs", warning=True))
    return found


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
    findings, cure = [], "start them all in one environment"
    for name in values[0]:
        seen = [str(each[name]) for each in values]
        usual = Counter(seen).most_common(1)[0][0]
        odd = {v: [r for r, each in enumerate(seen) if each == v] for v in seen if v != usual}
        if odd:
            each = ", ".join(f"{_ranks(ranks)} {value}" for value, ranks in odd.items())
            said = f"{name} differs: {each}, the others {usual}"
            level: Level = "warning" if name == "python" else "blocker"
            findings.append(Finding("ranks alike", level, said, cure))
    said = f"{len(values)} ranks, the same {', '.join(values[0])}"
    return findings or [Finding("ranks alike", "ok", said)]


def _merge(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """All ranks' findings as one list; a finding that only some ranks have names these."""
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(found):
        for each in findings:
            ranks_of.setdefault(each, []).append(rank)
    troubled = {each.check for each in ranks_of if each.level != "ok"}
    merged = []
    for each, ranks in ranks_of.items():
        if each.level == "ok":
            merged += [each] if ranks[0] == 0 and each.check not in troubled else []
        else:
            some = f"{_ranks(ranks)}: " if len(ranks) < len(found) else ""
            merged.append(replace(each, said=some + each.said))
    return merged


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"
