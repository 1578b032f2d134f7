"""What the processor of this host offers to the ranks that share it; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gradsync.errors import GradsyncError
from gradsync.hardware.description import Device, Link
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.hardware.timing.alpha_beta_cache import load_fits
from gradsync.runtime.machine import cpu_model, usable_cores
from gradsync.runtime.memory_limit import available_bytes, total_bytes
from gradsync.runtime.threads import cgroup_cores, choose_threads

_FLOP_PER_CYCLE = {
    "amx_bf16": 1024,
    "avx512_bf16": 64,
    "avx512f": 32,
    "fma": 32,
    "avx": 16,
    "bf16": 32,
    "asimd": 16,
}
"""Of one core, bf16 products or, where the CPU has none, fp32; the first one that it has counts.
amx_bf16: a 16 x 16 x 32 product every 16 cycles (Intel 64 and IA-32 Optimization Reference Manual,
TMUL). avx512_bf16, avx512f: one 512-bit instruction a cycle (Zen 4; some Xeons do two); fma, avx:
two of 256 bits; bf16, asimd: two of 128 bits (Arm)."""
_OLDEST = 8
_SHOWN = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "bf16", "i8mm", "sve", "sve2"),
)
_USUAL_HZ = 2e9
"""Where the system does not tell the clock, as on Arm."""

DEFAULT_LINK = Link(
    name="shared memory",
    alpha_s=2.6e-5,
    bytes_per_s=13.4e9,
    source="default: 2 ranks on an AMD EPYC; `gradsync bench collectives --save` measures",
)
"""From benchmarks/collectives/2-ranks/record.json: all_reduce, shared; alpha 51 us, 1/beta 13.4."""
_MESSAGES = ("shared", "ring", "backend")
"""Ways to all_reduce on one host, the one that gradsync would take first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """The part of a host that this user may occupy."""

    name: str
    cores: int
    """By affinity and container limit."""
    memory_bytes: int
    """By the container's limit."""
    free_bytes: int
    instructions: tuple[str, ...]
    """Of those that decide how fast matrices multiply, as the kernel names them."""
    clock_hz: float | None
    """Of the fastest core now; None where it is not told."""


def read_processor(root: Path = Path("/")) -> Processor:
    """Ask the system.

    Args:
        root: where /proc and /sys lie.
    """
    try:
        info = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    entries = [line.partition(":") for line in info.splitlines()]
    values = [(key.strip(), value.strip()) for key, _, value in entries]
    flags = {
        flag for key, value in values if key in ("flags", "Features") for flag in value.split()
    }
    cgroup, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    return Processor(
        name=next((value for key, value in values if key == "model name"), "") or cpu_model(),
        cores=choose_threads(1, limit=cgroup_cores(cgroup)),
        memory_bytes=total_bytes(cgroup, own),
        free_bytes=available_bytes(cgroup, own),
        instructions=tuple(name for name in _SHOWN if name in flags),
        clock_hz=max((_hertz(value) for key, value in values if key == "cpu MHz"), default=0)
        or None,
    )


def cpu_devices(processor: Processor, ranks: int) -> tuple[Device, ...]:
    """Equal shares of the cores and the memory, one per rank; pure.

    The peak is an estimate: cores x clock x operations per cycle of the widest instruction.
    """
    width = next(
        (
            (name, count)
            for name, count in _FLOP_PER_CYCLE.items()
            if name in processor.instructions
        ),
        ("none", _OLDEST),
    )
    clock = processor.clock_hz or _USUAL_HZ
    assumed = "" if processor.clock_hz else " (assumed)"
    share = processor.cores / ranks
    device = Device(
        kind="cpu",
        name=processor.name,
        memory_bytes=max(processor.memory_bytes // ranks, 1),
        free_bytes=min(processor.free_bytes, processor.memory_bytes) // ranks,
        peak_flops=share * clock * width[1],
        source=(
            f"estimate: cores {share:.3g} x {clock / 1e9:.3g} GHz{assumed} x {width[1]} operations "
            f"per cycle ({width[0]})"
        ),
    )
    return (device,) * ranks


def cpu_link(
    ranks: int, load: Callable[[dict[str, Any]], Sequence[Fit]] = load_fits
) -> tuple[Link, str]:
    """Between ranks of this host: as `gradsync bench collectives` measured it here, else usual.

    A measured all_reduce of n ranks, alpha + beta S, becomes the link by which a ring would take
    that time: 2 (n-1) messages of S / n bytes.

    Returns:
        The link, and a line about what went wrong, "" when nothing did.
    """
    for world_size in dict.fromkeys((max(ranks, 2), 2, 4)):
        try:
            fits = load(_measured_where(world_size))
        except GradsyncError as error:
            return DEFAULT_LINK, str(error)
        found = {fit.algorithm: fit for fit in fits if fit.operation == "all_reduce"}
        for algorithm in _MESSAGES:
            fit = found.get(algorithm)
            if fit is not None and fit.beta_s_per_byte > 0:
                return _as_ring(fit, world_size), ""
    return DEFAULT_LINK, ""


def _measured_where(world_size: int) -> dict[str, Any]:
    """What `bench collectives` keeps its figures under, for a default run on this machine."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "accelerator": None,
        "backend": "gloo",
        "world_size": world_size,
        "threads_per_rank": choose_threads(world_size),
        "torch": torch,
        "num_nodes": 1,
        "dtype": "fp32",
    }


def _as_ring(fit: Fit, world_size: int) -> Link:
    messages = 2 * (world_size - 1)
    return Link(
        name="shared memory",
        alpha_s=fit.alpha_s / messages,
        bytes_per_s=messages / world_size / fit.beta_s_per_byte,
        source=f"all_reduce ({fit.algorithm}) of {world_size} ranks, measured on this machine",
    )


def _hertz(megahertz: str) -> float:
    try:
        return float(megahertz) * 1e6
    except ValueError:
        return 0.0
