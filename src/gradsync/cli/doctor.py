"""`gradsync doctor`: what this process sees of its launcher and machine, without torch."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import psutil
import tyro

from gradsync.cli.arguments import parse
from gradsync.errors import ConfigError, LaunchError
from gradsync.plan.description import Hardware
from gradsync.plan.hardware_file import dump_hardware, hardware_document, hardware_rows
from gradsync.plan.machine import detect_hardware
from gradsync.runtime import environ
from gradsync.runtime.coordinator import CoordinatorPlan, plan_coordinator
from gradsync.runtime.machine import choose_threads
from gradsync.runtime.resolve import Resolution, resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Show which launcher was found and why, how the ranks will meet, and what the machine offers.

    Start it as you start training, for example `mpirun -np 2 gradsync doctor --launcher`.
    """

    launcher: bool = False
    """Show the launcher part only."""
    hardware: bool = False
    """Show the hardware only, as a file that `gradsync plan --hardware FILE.yaml` takes."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync doctor ARGV`; returns the exit code.

    Raises:
        LaunchError: launcher variables are partly set or contradict each other; the message holds
            what each launcher family says.
        ConfigError: one part only was asked for, but two were named.
    """
    options = parse(DoctorOptions, argv, "doctor", pairs=False)
    if options.launcher and options.hardware:
        raise ConfigError("--launcher and --hardware each show one part only; leave one out")
    env = environ.snapshot()
    if options.hardware:
        print(_hardware_file(detect_hardware(env), options.as_json), end="")
        return 0
    resolution = resolve(env)
    try:
        plan = plan_coordinator(env, resolution)
    except LaunchError as error:
        raise LaunchError(f"{error}\n{resolution.explain()}") from error
    document = launcher_document(resolution, plan)
    if options.launcher:
        print(json.dumps(document) if options.as_json else launcher_text(resolution, plan))
        return 0
    machine = describe_machine(resolution.world.local_world_size)
    hardware = detect_hardware(env)
    if options.as_json:
        described = {"machine": machine, "hardware": hardware_document(hardware)}
        print(json.dumps(document | described))
        return 0
    print(launcher_text(resolution, plan))
    rows = [(name.replace("_", " "), value) for name, value in machine.items()]
    for title, lines in (("machine", rows), ("hardware", hardware_rows(hardware))):
        print(f"\n{title}")
        for name, value in lines:
            print(f"  {name:<16}  {value}")
    return 0


def _hardware_file(hardware: Hardware, as_json: bool) -> str:
    return f"{json.dumps(hardware_document(hardware))}\n" if as_json else dump_hardware(hardware)


def launcher_text(resolution: Resolution, plan: CoordinatorPlan) -> str:
    """The launcher part, for people."""
    where = f" {plan.address}:{plan.port or 'free port'}" if plan.address else ""
    lines = [
        "launcher rows, in the order in which they count",
        resolution.explain(),
        "",
        f"world        {resolution.world.describe()}",
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
        "gradsync": _version("gradsync"),
        "torch": _version("torch"),
        "cores": choose_threads(1),
        "threads_per_rank": choose_threads(local_world_size),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
