"""Detection on a machine that a test writes down; nothing of this one shows through."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from gradsync.commands.plan import machine
from gradsync.commands.plan.description import Hardware
from gradsync.commands.plan.machine import Interfaces, Processor, detect_hardware

GIB = 2**30

EPYC = Processor(
    name="AMD EPYC",
    cores=8,
    memory_bytes=64 * GIB,
    free_bytes=48 * GIB,
    instructions=("avx2", "fma", "avx512f", "avx512_bf16"),
    clock_hz=2.5e9,
)
WIRED = Interfaces(names=("eth0",), megabits=0, infiniband_gigabits=())


def found(
    nvml: Any = None,
    env: dict[str, str] | None = None,
    *,
    root: Path = Path("/nowhere"),
    **more: Any,
) -> Hardware:
    """The hardware detected where `nvml` is the driver's library (None: not installed)."""
    torch = more.pop("torch", lambda: None)
    torch_version = more.pop("torch_version", "2.13.0")
    values: dict[str, Any] = {
        "_module": lambda name: nvml if name == "pynvml" else torch(),
        "version_of": lambda _: torch_version,
        "read_processor": lambda: EPYC,
        "read_interfaces": lambda: WIRED,
        "load_fits": lambda _: [],
    }
    known = {name: more.pop(name) for name in values.keys() & more.keys()}
    with patch.multiple(machine, **values | known):
        return detect_hardware(env or {}, root=root, **more)
