"""What there is to train on here: GPUs, cores, memory, links, hosts. No torch unless it is needed.

Asked are the NVIDIA driver (`nvidia-ml-py`), else torch where there is a driver, else the CPU; the
system for cores and memory; the launcher for hosts, which are taken to be alike. Nothing is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError
from gradsync.hardware.described.links import LINKS
from gradsync.hardware.described.name import pcie_of
from gradsync.hardware.description import Device, Hardware, Host, Link
from gradsync.hardware.detect.by_torch import torch_devices
from gradsync.hardware.detect.cpu import Processor, cpu_devices, cpu_link, read_processor
from gradsync.hardware.detect.network import Interfaces, network_link, read_interfaces
from gradsync.hardware.detect.nvml import read_gpus
from gradsync.hardware.detect.topology import host_link
from gradsync.hardware.detect.visible import visible_devices
from gradsync.runtime.resolve import resolve

_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""Files that an NVIDIA driver leaves, the last one under Windows."""


def _import_nvml() -> Any | None:
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def _import_torch() -> Any | None:
    try:
        return import_module("torch")
    except ImportError:
        return None


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Whom to ask; the defaults ask this machine."""

    nvml: Callable[[], Any | None] = _import_nvml
    """Gives the module `pynvml`, or None without it."""
    torch: Callable[[], Any | None] = _import_torch
    """Gives the module `torch`, or None without it."""
    torch_version: Callable[[], str] = _torch_version
    """Without importing it; "" when there is none."""
    processor: Callable[[], Processor] = read_processor
    """Cores, memory, instructions."""
    interfaces: Callable[[], Interfaces] = read_interfaces
    """The way to other hosts."""
    cpu_link: Callable[[int], tuple[Link, str]] = cpu_link
    """Between so many ranks of the CPU."""
    root: Path = field(default_factory=lambda: Path("/"))
    """Where /proc and /dev lie."""


def detect_hardware(
    env: Mapping[str, str],
    *,
    num_hosts: int | None = None,
    ranks_per_host: int | None = None,
    sources: Sources | None = None,
) -> Hardware:
    """What this process may use, and as many hosts like this one.

    A CPU has one device per rank: an equal share of its cores and memory.

    Args:
        env: the environment; CUDA_VISIBLE_DEVICES and the launcher's variables count.
        num_hosts: hosts; what the launcher says when None.
        ranks_per_host: devices of a CPU host. When None: as many as the launcher started here, or
            one per usable core. GPUs are counted, not divided.
        sources: whom to ask.

    Raises:
        ConfigError: a number below 1.
        LaunchError: the launcher's variables contradict each other.
    """
    for name, value in (("num_hosts", num_hosts), ("ranks_per_host", ranks_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}")
    sources = sources or Sources()
    world = resolve(env).world
    processor, interfaces = sources.processor(), sources.interfaces()
    notes: list[str] = []
    devices, link = _gpus(env, sources, notes)
    if not devices or link is None:
        started = world.local_world_size if world.is_distributed else processor.cores
        ranks = ranks_per_host or started
        devices = list(cpu_devices(processor, ranks))
        link, trouble = sources.cpu_link(ranks)
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


def _gpus(
    env: Mapping[str, str], sources: Sources, notes: list[str]
) -> tuple[list[Device], Link | None]:
    """The GPUs that may be used and the link between them; adds to `notes` what went wrong."""
    has_driver = any((sources.root / sign).exists() for sign in _DRIVER_SIGNS)
    nvml = sources.nvml()
    if nvml is not None:
        try:
            with _session(nvml):
                found = _ask_driver(nvml, env, sources, notes)
            if found is not None:
                return found
        except nvml.NVMLError as error:
            # Without a driver its library's complaint is no news.
            notes += [f"the NVIDIA driver does not answer: {error}"] if has_driver else []
    torch = sources.torch() if has_driver else None
    devices = torch_devices(torch) if torch is not None else []
    if not devices:
        return [], None
    notes.append("the GPUs are as torch sees them; nvidia-ml-py tells free memory and links")
    oldest = min(device.compute_capability or (0, 0) for device in devices)
    return devices, LINKS[pcie_of(oldest)]


def _ask_driver(
    nvml: Any, env: Mapping[str, str], sources: Sources, notes: list[str]
) -> tuple[list[Device], Link | None] | None:
    """As `_gpus`; None when there are GPUs, but none of them can be asked."""
    gpus, trouble = read_gpus(nvml)
    notes += trouble
    if trouble and not gpus:
        return None
    visible = visible_devices(env, gpus)
    if not visible:
        if gpus:
            notes.append(
                f"{len(gpus)} GPU(s) are here, none may be used: "
                f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')!r}"
            )
        return [], None
    slices = sum(entry.device.mig for entry in visible)
    if slices > 1:
        notes.append(
            f"{slices} MIG slices: CUDA shows a process one; give each rank its own "
            "CUDA_VISIBLE_DEVICES"
        )
    shared = [str(i) for i, entry in enumerate(visible) if entry.device.shared]
    if shared:
        notes.append(f"other processes use device {', '.join(shared)}")
    torch = sources.torch_version()
    if torch.endswith("+cpu"):
        notes.append(f"torch {torch} is built for the CPU and cannot use the GPUs")
    link, between = host_link(nvml, visible, gpus)
    notes += [between] if between else []
    return [entry.device for entry in visible], link


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()
