"""The machine to train on: GPUs, cores, memory, links, hosts. Imports torch only if needed.

GPUs are those that torch sees; data sheets supply only their arithmetic, and the link is the usual
one of such devices. Without GPUs ranks use the CPU. The system reports cores and memory, the
launcher (equal) hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import psutil

from gradsync.commands.plan.description import (
    DEVICES,
    NETWORKS,
    Device,
    Hardware,
    Host,
    Link,
    ethernet,
    infiniband,
    multiplies_bf16,
    usual_link,
)
from gradsync.commands.plan.measured import cpu_model, fit_conditions, load_fits
from gradsync.core.files import one_line
from gradsync.runtime.machine import (
    available_bytes,
    choose_threads,
    host_cores,
    total_bytes,
    usable_cores,
)
from gradsync.runtime.resolve import resolve

_FLOP_PER_CYCLE = {
    "amx_bf16": 1024,
    "avx512_bf16": 64,
    "avx512f": 32,
    "fma": 32,
    "avx": 16,
    "bf16": 32,
    "asimd": 16,
}
"""Operations of one core: bf16 products, or fp32 if the CPU has no bf16; the first match counts.
amx_bf16: a 16 x 16 x 32 product every 16 cycles (Intel 64 and IA-32 Optimization Reference Manual,
TMUL). avx512_bf16, avx512f: one 512-bit instruction a cycle (Zen 4; some Xeons do two); fma, avx:
two of 256 bits; bf16, asimd: two of 128 bits (Arm)."""
_OLDEST = 8
_USUAL_HZ = 2e9  # For a system that does not report the clock, as on Arm

DEFAULT_LINK = Link(
    name="shared memory",
    alpha_s=2.6e-5,
    bytes_per_s=13.4e9,
    source="default: 2 ranks on an AMD EPYC; `gradsync bench collectives --save` measures",
)
"""From benchmarks/collectives/2-ranks/record.json: all_reduce, shared; alpha 51 us, 1/beta 13.4."""
_MESSAGES = ("shared", "ring", "backend")  # To all_reduce on one host, as gradsync prefers

_UNKNOWN_SPEED = 65535  # Reported by some drivers that do not know the speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """The part of a host that this user may use."""

    name: str
    cores: int  # By affinity and container limit
    memory_bytes: int  # By the container's limit
    free_bytes: int
    instructions: tuple[str, ...]  # For products of matrices, by the kernel's names
    clock_hz: float | None  # The fastest core's now; None if not reported


def read_processor(root: Path = Path("/")) -> Processor:
    """Read the system's /proc and /sys under `root`."""
    try:
        info = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    entries = [line.partition(":") for line in info.splitlines()]
    values = [(key.strip(), value.strip()) for key, _, value in entries]
    flags = " ".join(value for key, value in values if key in ("flags", "Features")).split()
    cgroup, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    clocks = [float(value) * 1e6 for key, value in values if key == "cpu MHz"]
    return Processor(
        name=next((value for key, value in values if key == "model name"), "") or cpu_model(),
        cores=min(host_cores(cgroup), usable_cores()),
        memory_bytes=total_bytes(cgroup, own),
        free_bytes=available_bytes(cgroup, own),
        instructions=tuple(name for name in _FLOP_PER_CYCLE if name in flags),
        clock_hz=max(clocks, default=0) or None,
    )


def fast_dtype(device: str, root: Path = Path("/")) -> Literal["bf16", "fp32"]:
    """The dtype of `auto` on `device` (auto, cpu, cuda or cuda:N): bf16 if the hardware multiplies
    it, else fp32. Torch is imported only if there may be a GPU."""
    if device != "cpu" and (device != "auto" or may_have_gpu(root)):
        import torch

        if torch.cuda.is_available():
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if multiplies_bf16(read_processor().instructions) else "fp32"


def cpu_devices(processor: Processor, ranks: int) -> tuple[Device, ...]:
    """Equal shares of the cores and the memory, one per rank; the peak is an estimate: cores x
    clock x operations per cycle of the widest instruction."""
    widest = next((name for name in _FLOP_PER_CYCLE if name in processor.instructions), "none")
    per_cycle = _FLOP_PER_CYCLE.get(widest, _OLDEST)
    clock = processor.clock_hz or _USUAL_HZ
    assumed = "" if processor.clock_hz else " (assumed)"
    share = processor.cores / ranks
    device = Device(
        kind="cpu",
        name=processor.name,
        memory_bytes=max(processor.memory_bytes // ranks, 1),
        free_bytes=min(processor.free_bytes, processor.memory_bytes) // ranks,
        peak_flops=share * clock * per_cycle,
        source=(
            f"estimate: cores {share:.3g} x {clock / 1e9:.3g} GHz{assumed} x "
            f"{per_cycle} operations per cycle ({widest})"
        ),
    )
    return (device,) * ranks


def cpu_link(ranks: int) -> Link:
    """Between ranks of this host: as `gradsync bench collectives` measured it here, else a default.

    A measured all_reduce of n ranks, alpha + beta S, becomes a link with which a ring takes the
    same time: 2 (n-1) messages of S / n bytes.
    """
    ranks = max(ranks, 2)
    here = load_fits(fit_conditions("cpu", ranks, choose_threads(ranks)))
    found = {fit.algorithm: fit for fit in here if fit.operation == "all_reduce"}
    for algorithm in _MESSAGES:
        fit = found.get(algorithm)
        if fit is not None and fit.beta_s_per_byte > 0:
            messages = 2 * (ranks - 1)
            return replace(
                DEFAULT_LINK,
                alpha_s=fit.alpha_s / messages,
                bytes_per_s=messages / ranks / fit.beta_s_per_byte,
                source=f"all_reduce ({algorithm}) of {ranks} ranks, measured on this machine",
            )
    return DEFAULT_LINK


def network_link(ranks_per_host: int, root: Path = Path("/")) -> Link:
    """Between this host and equal ones: the rate of the adapters' active ports, in /sys as `400
    Gb/sec (4X NDR)`, with the usual latency of such networks."""
    gigabits = 0.0
    for state in (root / "sys/class/infiniband").glob("*/ports/*/state"):
        with suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in state.read_text():
                gigabits += float(state.with_name("rate").read_text().split()[0])
    if gigabits:
        source = f"{gigabits:g} Gbit/s of active ports, divided among {ranks_per_host} ranks"
        return replace(infiniband("infiniband", gigabits / ranks_per_host), source=source)
    speeds = [interface.speed for interface in psutil.net_if_stats().values() if interface.isup]
    megabits = max((speed for speed in speeds if speed != _UNKNOWN_SPEED), default=0)
    if not megabits:  # as in most virtual machines
        return replace(NETWORKS["ethernet-10g"], source="assumed: no interface tells its speed")
    source = f"{megabits} Mbit/s, as the fastest interface says"
    return replace(ethernet(megabits / 1000), source=source)


_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")  # dxg: on Windows
_GPU_FLOP_PER_CYCLE = {
    **{(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}
"""Dense 16-bit products with fp32 sums, of one multiprocessor, by compute capability. From the
white papers' peak / (multiprocessors x boost clock), such as 312e12 / (108 x 1.41e9) = 2049. If
GeForce parts run at half the rate of professional ones, the GeForce figure."""
_GPU_OTHERS = 512
_GPU_CLOCK_HZ = 1.5e9


def has_driver(root: Path) -> bool:
    """Whether an NVIDIA driver is loaded on the system whose /proc and /dev lie under `root`."""
    return any((root / sign).exists() for sign in _DRIVER_SIGNS)


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Whether a driver is loaded, NVIDIA's or AMD's; torch has the last word."""
    return has_driver(root) or (root / "dev/kfd").exists()


def find_gpus(env: Mapping[str, str], root: Path, notes: list[str]) -> list[Device]:
    """The usable GPUs with their free memory; adds problems to `notes`."""
    if not has_driver(root) or env.get("CUDA_VISIBLE_DEVICES", "all").strip() == "":
        return []
    torch: Any = import_module("torch")
    devices = torch_devices(torch)
    if not devices:
        notes.append(f"torch {torch.__version__} cannot use the GPUs here")
    try:
        used = [torch.cuda.device_memory_used(index) for index in range(len(devices))]
    except Exception as error:  # each library behind it has its own; all memory counts as free
        notes.append(f"free memory is unknown: {one_line(error)}")
        return devices
    return [
        replace(device, free_bytes=max(device.memory_bytes - num_bytes, 0))
        for device, num_bytes in zip(devices, used, strict=True)
    ]


def torch_devices(torch: Any) -> list[Device]:
    """The CUDA devices that torch (the module) sees; a query of free memory would allocate some."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [detected_device(torch.cuda.get_device_properties(index)) for index in range(count)]


def detected_device(told: Any) -> Device:
    """A device by torch's properties of it, with the data sheet's rates for its driver's name, else
    an estimated peak."""
    for known in DEVICES.values():
        # Older drivers omit the maker.
        if known.name.removeprefix("NVIDIA ") == told.name.removeprefix("NVIDIA "):
            return replace(known, memory_bytes=told.total_memory)
    capability, num_sms = (told.major, told.minor), told.multi_processor_count
    per_cycle = _GPU_FLOP_PER_CYCLE.get(capability, _GPU_OTHERS)
    return Device(
        kind="cuda",
        name=told.name,
        memory_bytes=told.total_memory,
        compute_capability=capability,
        peak_flops=per_cycle * num_sms * _GPU_CLOCK_HZ,
        source=(
            f"estimate: {num_sms} multiprocessors of compute capability "
            f"{told.major}.{told.minor} x {_GPU_CLOCK_HZ / 1e9:.3g} GHz (assumed)"
        ),
    )


def detect_hardware(
    env: Mapping[str, str],
    *,
    num_hosts: int | None = None,
    ranks_per_host: int | None = None,
    root: Path = Path("/"),
) -> Hardware:
    """The devices that this process may use, and all hosts, which equal this one.

    A CPU has one device per rank: an equal share of its cores and memory.

    Args:
        env: uses CUDA_VISIBLE_DEVICES and the launcher's variables; LaunchError if those contradict
            each other.
        num_hosts: number of hosts; None: from the launcher.
        ranks_per_host: devices of a CPU host. None: as many as the launcher started here, or one
            per usable core. GPUs are counted, not divided.
        root: where /proc and /dev lie.
    """
    world = resolve(env).world
    processor = read_processor()
    notes: list[str] = []
    devices = tuple(find_gpus(env, root, notes))
    if not devices:
        started = world.local_world_size if world.is_distributed else processor.cores
        devices = cpu_devices(processor, ranks_per_host or started)
    host = Host(
        devices=devices,
        link=usual_link(devices) if devices[0].kind == "cuda" else cpu_link(len(devices)),
        cores=processor.cores,
        memory_bytes=processor.memory_bytes,
        instructions=processor.instructions,
    )
    hosts = num_hosts or world.num_nodes
    return Hardware(
        hosts=(host,) * hosts,
        network=network_link(len(devices)) if hosts > 1 else None,
        notes=tuple(notes),
    )
