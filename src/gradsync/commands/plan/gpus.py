"""GPUs of this host that a process may use, and the link between them.

The NVIDIA driver reports them through `nvidia-ml-py` (module pynvml, here `nvml`); without it torch
does. Memory is always the driver's figure; the catalogue supplies only the peak arithmetic for a
name. Devices communicate over NVLink if all of them are joined by it, else over PCIe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from gradsync.commands.plan.catalog import detected_device, nvlink, pcie, pcie_of
from gradsync.commands.plan.description import Device, Link
from gradsync.commands.plan.measured import version_of
from gradsync.core.files import counted

_DRIVER_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""Files that an NVIDIA driver creates, the last one on Windows."""
_CORES_PER_SM = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
"""CUDA cores of a multiprocessor, by compute capability; 128 for all others since Maxwell."""
_USUAL_PCIE = (3, 16)  # Generation and lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of the host, whether or not this process may use it."""

    device: Device
    uuid: str
    handle: Any
    nvlinks: int  # Number of links that are up
    pcie: tuple[int, int]
    """Highest generation and lanes of GPU and slot; the current ones drop to save power."""


def has_driver(root: Path) -> bool:
    """Whether an NVIDIA driver is loaded on the system whose /proc and /dev lie under `root`."""
    return any((root / sign).exists() for sign in _DRIVER_SIGNS)


def find_gpus(
    env: Mapping[str, str], root: Path, notes: list[str]
) -> tuple[list[Device], Link | None]:
    """The usable GPUs and the link between them; adds problems to `notes`."""
    nvml = _module("pynvml")
    if nvml is not None:
        try:
            nvml.nvmlInit()
            try:
                gpus = _read_gpus(nvml, notes)
                if gpus:
                    return _usable(nvml, gpus, env, notes)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            # Without a driver its library's error is no news.
            notes += [f"the NVIDIA driver does not answer: {error}"] if has_driver(root) else []
    torch = _module("torch") if has_driver(root) else None
    devices = torch_devices(torch) if torch is not None else []
    if not devices:
        return [], None
    notes.append("the GPUs are as torch sees them; nvidia-ml-py tells free memory and links")
    return devices, pcie_of(devices)


def _module(name: str) -> Any | None:
    """`pynvml` or `torch`; None if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _usable(
    nvml: Any, gpus: Sequence[Gpu], env: Mapping[str, str], notes: list[str]
) -> tuple[list[Device], Link | None]:
    visible = visible_gpus(env, gpus)
    if gpus and not visible:
        notes.append(
            f"none of {counted(len(gpus), 'GPU')} here may be used: "
            f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')!r}"
        )
    if not visible:
        return [], None
    torch = version_of("torch")
    if torch.endswith("+cpu"):
        notes.append(f"torch {torch} is built for the CPU and cannot use the GPUs")
    return [gpu.device for gpu in visible], _link_between(nvml, visible)


def _read_gpus(nvml: Any, notes: list[str]) -> list[Gpu]:
    """Every GPU that the driver reports; NVMLError if the driver does not answer at all."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} is left out: {error}")
    return gpus


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    def ask(otherwise: Any, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or `otherwise` if the device or the driver has none."""
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:
            return otherwise

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    cores = ask(0, nvml.nvmlDeviceGetNumGpuCores)
    megahertz = ask(0, nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
    device = detected_device(
        nvml.nvmlDeviceGetName(handle),
        (major, minor),
        max(cores // _CORES_PER_SM.get((major, minor), 128), 1),
        megahertz * 1e6 or None,
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    return Gpu(
        device=device,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        handle=handle,
        nvlinks=sum(ask(0, nvml.nvmlDeviceGetNvLinkState, link) for link in links),
        pcie=(
            ask(_USUAL_PCIE[0], nvml.nvmlDeviceGetMaxPcieLinkGeneration),
            ask(_USUAL_PCIE[1], nvml.nvmlDeviceGetMaxPcieLinkWidth),
        ),
    )


def torch_devices(torch: Any) -> list[Device]:
    """The CUDA devices that torch (the module) sees; none without CUDA. Free memory is not queried,
    as that would allocate some."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        detected_device(
            *(told.name, (told.major, told.minor), told.multi_processor_count, None),
            memory_bytes=told.total_memory,
        )
        for told in map(torch.cuda.get_device_properties, range(count))
    ]


def visible_gpus(env: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """GPUs in the order in which CUDA counts them.

    `CUDA_VISIBLE_DEVICES` is parsed as CUDA does (CUDA C++ Programming Guide, "CUDA Environment
    Variables"). Identifiers are indices or names; a prefix is enough if it is unique. The first
    invalid identifier ends the list; a duplicate empties it. Unset means all, empty means none.
    """
    ordered = list(gpus)
    if env.get("CUDA_DEVICE_ORDER", "").strip().upper() != "PCI_BUS_ID":
        # FASTEST_FIRST: CUDA does not document the measure; here it is the peak.
        ordered.sort(key=lambda gpu: -gpu.device.peak_flops)
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return ordered
    by_index = {str(index): gpu for index, gpu in enumerate(ordered)}
    chosen: list[Gpu] = []
    for word in map(str.strip, value.split(",")):
        named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        found = by_index.get(word) or (named[0] if len(named) == 1 else None)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _link_between(nvml: Any, gpus: Sequence[Gpu]) -> Link:
    """The link between any two of these GPUs, as the slowest pair has it; for one GPU its PCIe."""

    def joined(one: Gpu, other: Gpu) -> bool:
        """Whether NVLink connects them, directly or through switches."""
        try:
            status = nvml.nvmlDeviceGetP2PStatus(
                one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
        except nvml.NVMLError:
            return False
        return status == nvml.NVML_P2P_STATUS_OK

    capability = gpus[0].device.compute_capability
    links = min(gpu.nvlinks for gpu in gpus)
    if capability and links and len(gpus) > 1 and all(joined(*p) for p in combinations(gpus, 2)):
        return nvlink(capability, links)
    generation, lanes = (min(figures) for figures in zip(*(g.pcie for g in gpus), strict=True))
    return pcie(generation, lanes)
