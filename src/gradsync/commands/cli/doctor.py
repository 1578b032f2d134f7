"""`gradsync doctor`: what this process sees of its launcher and machine, and whether it is enough.

--launcher and --hardware only describe, without torch; else the findings of `cli/health.py` follow.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import psutil
import tyro

from gradsync.commands.cli import health
from gradsync.commands.cli.health import Facts, Finding, from_message
from gradsync.commands.plan.description import gb
from gradsync.commands.plan.hardware_file import dump_hardware, hardware_document
from gradsync.commands.plan.machine import detect_hardware
from gradsync.commands.plan.measured import version_of
from gradsync.commands.plan.report import hardware_lines
from gradsync.core.files import counted, printable
from gradsync.errors import ConfigError, GradsyncError, LaunchError, RunError
from gradsync.runtime import environ
from gradsync.runtime.arguments import parse
from gradsync.runtime.coordinator import CoordinatorPlan, plan_coordinator
from gradsync.runtime.machine import choose_threads
from gradsync.runtime.resolve import Resolution, resolve
from gradsync.world import World

Report = Callable[[Sequence[Finding]], int]
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
    out: str = ""
    """Folder that a run would write to; default: the working folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document."""


def run(argv: list[str]) -> int:
    """Run `gradsync doctor ARGV`; returns the exit code.

    Raises:
        LaunchError: with --launcher or --hardware, launcher variables are invalid.
        ConfigError: two parts were requested; only one can be.
        RunError: a rank other than the main one could not meet the others.
    """
    options = parse(DoctorOptions, argv, "doctor")
    if options.launcher and options.hardware:
        raise ConfigError("--launcher and --hardware each show one part only; leave one out")
    env = environ.snapshot()
    if options.hardware:
        hardware = detect_hardware(env)
        as_json = f"{json.dumps(hardware_document(hardware))}\n"
        print(as_json if options.as_json else dump_hardware(hardware), end="")
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
        found = [
            from_message("launcher", "blocker", error),
            *health.judge(health.gather(env, World(), "")),
        ]
        return _print(options, {"machine": describe_machine(1)}, str(error), found)
    document, text = launcher_document(resolution, plan), launcher_text(resolution, plan)
    if options.launcher:
        print(json.dumps(document) if options.as_json else text)
        return 0

    def report(findings: Sequence[Finding]) -> int:
        hardware = detect_hardware(env)
        machine = describe_machine(resolution.world.local_world_size)
        shown = {name: value for name, value in machine.items() if name != "memory_gib"}
        shown["memory"] = gb(hardware.hosts[0].memory_bytes)
        rows = [f"{name.replace('_', ' '):<16}  {value}" for name, value in shown.items()]
        lines = [text]
        for title, part in (("machine", rows), ("hardware", hardware_lines(hardware))):
            lines += ["", title, *(f"  {line}" for line in part)]
        described = {"machine": machine, "hardware": hardware_document(hardware)}
        return _print(options, document | described, "\n".join(lines), findings)

    said = f"{resolution.world.launcher}, {resolution.reading.says()}; {plan.why}"
    warned = [from_message("launcher", "warning", each) for each in resolution.warnings]
    launcher = warned or [Finding("launcher", "ok", said)]
    towards = "" if resolution.world.one_host else plan.address
    return _diagnose(env, resolution.world, towards, lambda found: report([*launcher, *found]))


def _diagnose(env: dict[str, str], world: World, towards: str, report: Report) -> int:
    """Make rank 0 report findings about this rank or, with several ranks, about all of them."""
    facts = health.gather(env, world, towards)
    if not world.is_distributed:
        return report([*health.judge(facts), Finding("ranks", "ok", "one, nothing to compare")])
    if facts["torch_problem"]:
        return report(health.judge(facts)) if world.is_main else 1
    from gradsync.comm.process_group import ProcessGroupCommunicator
    from gradsync.comm.values import all_gather_json, all_gather_numbers
    from gradsync.runtime.session import Session, SessionOptions

    session = Session(SessionOptions(rendezvous_timeout_s=_MEET_S, timeout_s=_ANSWER_S), env=env)
    try:
        with session as here:
            import torch.distributed as dist

            comm = ProcessGroupCommunicator(dist.group.WORLD)
            sums = {"gloo": _try_sum("cpu")}
            if here.device_name != "cpu":
                sums["nccl"] = _try_sum(here.device_name)
            findings = health.judge_ranks(all_gather_json(comm, {"facts": facts, "sums": sums}))
            code = report(findings) if world.is_main else 0
            # A launcher ends all ranks after a failure: rank 0 prints first, here and below.
            return max(all_gather_numbers(comm, code))
    except (GradsyncError, RuntimeError, OSError) as error:
        problem = from_message("ranks", "blocker", error)
        if world.is_main:
            return report([*health.judge(facts), problem])
        time.sleep(_SILENCE_S)
        raise RunError(f"{problem.said}; {problem.cure}") from error


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
    """Print the document or the text with the findings, the disk's last; returns the exit code."""
    findings = [*found, health.judge_disk(health.gather_disk(options.out))]
    lines = [text, "", "findings"]
    for each in findings:
        cure = f"; {each.cure}" if each.cure else ""
        lines.append(printable(f"  {each.level:<7}  {each.check:<13}  {each.said}{cure}", kept=""))
    counts = Counter(each.level for each in findings)
    ready = not counts["blocker"]
    numbers = ", ".join(counted(counts[each], each) for each in ("blocker", "warning"))
    lines += ["", f"verdict: {'ready' if ready else 'not ready'}, {numbers}"]
    listed = [asdict(finding) for finding in findings]
    whole = {**document, "findings": listed, "ready": ready}
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


def launcher_document(resolution: Resolution, plan: CoordinatorPlan) -> dict[str, Any]:
    """The launcher part, for programs."""
    rows = [
        {
            "name": reading.name,
            "complete": reading.complete,
            "won": reading is resolution.reading,
            "says": reading.says(),
            "why": reason,
            "seen": dict(reading.seen),
            "missing": list(reading.missing),
        }
        for reading, reason in zip(resolution.readings, resolution.reasons, strict=True)
    ]
    return {
        "rows": rows,
        "world": asdict(resolution.world),
        "needs_hosts": resolution.reading.needs_hosts,
        "generation": resolution.generation,
        "coordinator": asdict(plan),
        "warnings": list(resolution.warnings),
    }


def describe_machine(local_world_size: int) -> dict[str, str | int | float]:
    """Versions, cores and memory (GiB), without importing torch.

    `cores` are those this process may use; `threads_per_rank` is what a session would pin.
    """
    return {
        "python": platform.python_version(),
        "gradsync": version_of("gradsync") or "not installed",
        "torch": version_of("torch") or "not installed",
        "cores": choose_threads(1),
        "threads_per_rank": choose_threads(local_world_size),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
