"""The machine to train on: GPUs, cores, memory, links, hosts. Imports torch only if needed.

GPUs come from the NVIDIA driver (`nvidia-ml-py`), or from torch if there is a driver, else ranks
use the CPU. The system reports cores and memory, the launcher (equal) hosts. Nothing is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from gradsync.commands.plan.catalog import NETWORKS, pcie_of
from gradsync.commands.plan.collectives import load_fits
from gradsync.commands.plan.description import Device, Hardware, Host, Link, multiplies_bf16
from gradsync.commands.plan.gpus import host_link, read_gpus, torch_devices, visible_devices
from gradsync.core.files import counted
from gradsync.errors import ConfigError, GradsyncError
from gradsync.runtime.machine import (
    available_bytes,
    choose_threads,
    cpu_model,
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
_SHOWN = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "bf16", "i8mm", "sve", "sve2"),
)
_USUAL_HZ = 2e9  # For a system that does not report the clock, as on Arm

DEFAULT_LINK = Link(
    name="shared memory",
    alpha_s=2.6e-5,
    bytes_per_s=13.4e9,
    source="default: 2 ranks on an AMD EPYC; `gradsync bench collectives --save` measures",
)
"""From benchmarks/collectives/2-ranks/record.json: all_reduce, shared; alpha 51 us, 1/beta 13.4."""
_MESSAGES = ("shared", "ring", "backend")
"""Algorithms to all_reduce on one host, in gradsync's order of preference."""

_SLOWEST = "ethernet-10g"
"""Assumed if the system does not report the speed, as in most virtual machines."""
_UNKNOWN_SPEED = 65535  # Reported by some drivers that do not know the speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """The part of a host that this user may use."""

    name: str
    cores: int  # By affinity and container limit
    memory_bytes: int  # By the container's limit
    free_bytes: int
    instructions: tuple[str, ...]
    """Instructions that determine how fast matrices multiply, by the kernel's names."""
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
    clocks = [_number(value) * 1e6 for key, value in values if key == "cpu MHz"]
    return Processor(
        name=next((value for key, value in values if key == "model name"), "") or cpu_model(),
        cores=min(host_cores(cgroup), usable_cores()),
        memory_bytes=total_bytes(cgroup, own),
        free_bytes=available_bytes(cgroup, own),
        instructions=tuple(name for name in _SHOWN if name in flags),
        clock_hz=max(clocks, default=0) or None,
    )


def fast_dtype(device: str, root: Path = Path("/")) -> Literal["bf16", "fp32"]:
    """The dtype of `auto` on `device` (auto, cpu, cuda or cuda:N): bf16 if the hardware multiplies
    it, else fp32. Torch is imported only if there may be a GPU."""
    signs = (*_DRIVER_SIGNS, "dev/kfd")
    if device != "cpu" and (device != "auto" or any((root / sign).exists() for sign in signs)):
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


def cpu_link(ranks: int) -> tuple[Link, str]:
    """Between ranks of this host: as `gradsync bench collectives` measured it here, else a default;
    also returns a line about what went wrong, "" if nothing did.

    A measured all_reduce of n ranks, alpha + beta S, becomes a link with which a ring takes the
    same time: 2 (n-1) messages of S / n bytes.
    """
    for world_size in dict.fromkeys((max(ranks, 2), 2, 4)):
        try:
            fits = load_fits(_measured_where(world_size))
        except GradsyncError as error:
            return DEFAULT_LINK, str(error)
        found = {fit.algorithm: fit for fit in fits if fit.operation == "all_reduce"}
        for algorithm in _MESSAGES:
            fit = found.get(algorithm)
            if fit is not None and fit.beta_s_per_byte > 0:
                messages = 2 * (world_size - 1)
                link = replace(
                    DEFAULT_LINK,
                    alpha_s=fit.alpha_s / messages,
                    bytes_per_s=messages / world_size / fit.beta_s_per_byte,
                    source=f"all_reduce ({algorithm}) of {world_size} ranks, measured on this "
                    "machine",
                )
                return link, ""
    return DEFAULT_LINK, ""


def _measured_where(world_size: int) -> dict[str, Any]:
    """The key under which `bench collectives` stores its figures, for a default run here."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "accelerator": None,
        "backend": "gloo",
        "world_size": world_size,
        "threads_per_rank": choose_threads(world_size),
        "torch": version_of("torch") or "none",
        "num_nodes": 1,
        "dtype": "fp32",
    }


def version_of(package: str) -> str:
    """Its version, without importing it; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _number(text: str) -> float:
    """The number, or 0 if the text is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interfaces:
    """Network interfaces that are up, except loopback."""

    names: tuple[str, ...]
    megabits: int  # Rate of the fastest, as its driver reports; 0 if unknown
    infiniband_gigabits: tuple[float, ...]  # Rate of each active InfiniBand (or RoCE) port


def read_interfaces(root: Path = Path("/")) -> Interfaces:
    """Read the system's /sys under `root`."""
    up = {
        name: interface
        for name, interface in psutil.net_if_stats().items()
        if interface.isup and "loopback" not in interface.flags.split(",")
    }
    return Interfaces(
        names=tuple(sorted(up)),
        megabits=max((i.speed for i in up.values() if i.speed != _UNKNOWN_SPEED), default=0),
        infiniband_gigabits=tuple(_active_ports(root / "sys/class/infiniband")),
    )


def network_link(interfaces: Interfaces, ranks_per_host: int) -> Link:
    """Between this host and equal ones: the rate comes from the adapters, the latency is that of
    the usual network of their kind (`gradsync plan --network` takes measured ones)."""
    if interfaces.infiniband_gigabits:
        usual = NETWORKS["infiniband-hdr"]
        total = sum(interfaces.infiniband_gigabits)
        return Link(
            name="infiniband",
            alpha_s=usual.alpha_s,
            bytes_per_s=total * 1e9 / 8 / ranks_per_host,
            source=f"{total:g} Gbit/s of active ports, divided among {ranks_per_host} ranks",
        )
    usual = NETWORKS[_SLOWEST]
    if not interfaces.megabits:
        return replace(usual, source="assumed: no interface tells its speed")
    return replace(
        usual,
        name=f"ethernet-{interfaces.megabits / 1000:g}g",
        bytes_per_s=usual.bytes_per_s * interfaces.megabits / 10_000,
        source=f"{interfaces.megabits} Mbit/s, as the fastest interface says",
    )


def _active_ports(adapters: Path) -> list[float]:
    """Rates of the ports that are up, from lines such as `400 Gb/sec (4X NDR)`."""
    found = []
    for state in sorted(adapters.glob("*/ports/*/state")):
        try:
            if "ACTIVE" in state.read_text():
                found.append(float(state.with_name("rate").read_text().split()[0]))
        except (OSError, ValueError, IndexError):
            continue
    return found


_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""Files that an NVIDIA driver creates, the last one on Windows."""


def _module(name: str) -> Any | None:
    """`pynvml` or `torch`; None if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


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
    for name, value in (("num_hosts", num_hosts), ("ranks_per_host", ranks_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}")
    world = resolve(env).world
    processor, interfaces = read_processor(), read_interfaces()
    notes: list[str] = []
    devices, link = _gpus(env, root, notes)
    if not devices or link is None:
        started = world.local_world_size if world.is_distributed else processor.cores
        ranks = ranks_per_host or started
        devices = list(cpu_devices(processor, ranks))
        link, trouble = cpu_link(ranks)
        notes += [trouble] if trouble else []
    host = Host(
        devices=tuple(devices),
        link=link,
        cores=processor.cores,
        memory_bytes=processor.memory_bytes,
        instructions=processor.instructions,
        interfaces=interfaces.names,
    )
    hosts = num_hosts or world.num_nodes
    return Hardware(
        hosts=(host,) * hosts,
        network=network_link(interfaces, len(devices)) if hosts > 1 else None,
        notes=tuple(notes),
    )


def _gpus(env: Mapping[str, str], root: Path, notes: list[str]) -> tuple[list[Device], Link | None]:
    """The usable GPUs and the link between them; adds problems to `notes`."""
    has_driver = any((root / sign).exists() for sign in _DRIVER_SIGNS)
    nvml = _module("pynvml")
    if nvml is not None:
        try:
            nvml.nvmlInit()
            try:
                found = _ask_driver(nvml, env, notes)
            finally:
                nvml.nvmlShutdown()
            if found is not None:
                return found
        except nvml.NVMLError as error:
            # Without a driver its library's error is no news.
            notes += [f"the NVIDIA driver does not answer: {error}"] if has_driver else []
    torch = _module("torch") if has_driver else None
    devices = torch_devices(torch) if torch is not None else []
    if not devices:
        return [], None
    notes.append("the GPUs are as torch sees them; nvidia-ml-py tells free memory and links")
    return devices, pcie_of(devices)


def _ask_driver(
    nvml: Any, env: Mapping[str, str], notes: list[str]
) -> tuple[list[Device], Link | None] | None:
    """As `_gpus`; None if there are GPUs, but none can be queried."""
    gpus, trouble = read_gpus(nvml)
    notes += trouble
    if trouble and not gpus:
        return None
    visible = visible_devices(env, gpus)
    if not visible:
        if gpus:
            notes.append(
                f"none of {counted(len(gpus), 'GPU')} here may be used: "
                f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')!r}"
            )
        return [], None
    shared = [str(i) for i, gpu in enumerate(visible) if gpu.device.shared]
    if shared:
        notes.append(f"other processes use device {', '.join(shared)}")
    torch = version_of("torch")
    if torch.endswith("+cpu"):
        notes.append(f"torch {torch} is built for the CPU and cannot use the GPUs")
    link, between = host_link(nvml, visible, gpus)
    notes += [between] if between else []
    return [gpu.device for gpu in visible], link
