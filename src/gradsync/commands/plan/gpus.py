"""GPUs of a host, which of them a process may use, and their links.

The NVIDIA driver reports them through `nvidia-ml-py` (module pynvml, here `nvml`, initialised);
without it torch does. Memory is always the driver's figure; the catalogue supplies only the peak
arithmetic for a name. Devices communicate over NVLink if present, else over PCIe.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gradsync.commands.plan.catalog import detected_device, nvlink, pcie
from gradsync.commands.plan.description import Device, Link
from gradsync.runtime.bounds import whole_number

_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""CUDA cores of a multiprocessor, by compute capability; 128 for all others since Maxwell."""
_ACROSS_SOCKETS = 10e9
"""Bytes per second: NCCL's figure for two Skylake CPUs (`src/graph/topo.h`, SKL_QPI_BW). Newer CPUs
are faster, but the driver does not identify them."""
_USUAL_GENERATION, _USUAL_LANES = 3, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of the host, whether or not this process may use it."""

    index: int  # In `nvidia-smi` order, by PCI bus
    device: Device
    uuid: str
    handle: Any
    bus: str  # PCI bus id
    wires: Sequence[str]  # Bus id at the other end of each NVLink that is up; "": unknown
    pcie: tuple[int, int]
    """Highest generation and lanes of GPU and slot; the current ones drop to save power."""


def read_gpus(nvml: Any) -> tuple[list[Gpu], list[str]]:
    """Every GPU that the driver reports, and a line for each that cannot be queried or is divided;
    raises NVMLError if the driver does not answer at all."""
    gpus, notes = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0]:
                notes.append(f"GPU {index} is left out: it is divided into slices (MIG)")
            else:
                gpus.append(_read_gpu(nvml, index, handle))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} is left out: {error}")
    return gpus, notes


def _read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    name = _text(nvml.nvmlDeviceGetName(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    cores = ask(nvml, 0, nvml.nvmlDeviceGetNumGpuCores, handle)
    megahertz = ask(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    num_sms = max(cores // _CORES_PER_SM.get((major, minor), 128), 1)
    device = detected_device(
        *(name, (major, minor), num_sms, megahertz * 1e6 or None),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        shared=_is_shared(nvml, handle),
    )
    bus = ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        handle=handle,
        device=device,
        bus=f"GPU {index}" if bus is None else _text(bus.busId).lower(),
        wires=_wires(nvml, handle),
        pcie=(
            ask(nvml, _USUAL_GENERATION, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            ask(nvml, _USUAL_LANES, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        ),
    )


def _is_shared(nvml: Any, handle: Any) -> bool:
    """Whether another process computes on it. In a container the driver may not know."""
    processes = ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return any(process.pid != os.getpid() for process in processes)


def ask(nvml: Any, otherwise: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or `otherwise` if the device or the driver has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    """Older versions of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else value


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


def visible_devices(env: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Gpu]:
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
    chosen: list[Gpu] = []
    for word in value.split(","):
        found = _find(word.strip(), ordered)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _find(word: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU that an identifier stands for."""
    if word.isascii() and word.isdecimal():
        number = whole_number(word)
        return None if number is None or number >= len(gpus) else gpus[number]
    found = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


def host_link(nvml: Any, used: Sequence[Gpu], gpus: Sequence[Gpu]) -> tuple[Link, str]:
    """The slowest link between two of the visible devices, `used` (for one device, its PCIe), and a
    line on all pairs, "" if all are equal. NVLinks that lead to none of the host's `gpus` lead to a
    switch."""
    if len(used) == 1:
        alone = _pcie(used[0], used[0])
        return replace(alone, source=f"the one device's own; {alone.source}"), ""
    pairs = [
        (_between(nvml, one, other, gpus), i, j)
        for (i, one), (j, other) in combinations(enumerate(used), 2)
    ]
    slowest, i, j = min(pairs, key=lambda pair: pair[0].bytes_per_s)
    note = ""
    if len({link.bytes_per_s for link, _, _ in pairs}) > 1:
        counts = Counter(link.name for link, _, _ in pairs)
        all_pairs = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        note = f"pairs of devices by link: {all_pairs}; plans reckon with the slowest, {i} to {j}"
    which = f"devices {i} and {j}, the slowest pair" if note else "every pair of devices"
    return replace(slowest, source=f"{which}; {slowest.source}"), note


def _between(nvml: Any, one: Gpu, other: Gpu, gpus: Sequence[Gpu]) -> Link:
    """The link between two GPUs."""
    links = one.wires.count(other.bus)
    if not links and _joined(nvml, one, other):
        known = {gpu.bus for gpu in gpus}
        links = min(sum(end not in known for end in gpu.wires) for gpu in (one, other))
    if links and one.device.compute_capability is not None:
        return nvlink(one.device.compute_capability, links)
    link = _pcie(one, other)
    level = ask(nvml, 0, nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle)
    if level >= nvml.NVML_TOPOLOGY_SYSTEM:
        return replace(
            link,
            name=f"{link.name} across sockets",
            bytes_per_s=min(link.bytes_per_s, _ACROSS_SOCKETS),
            source=f"{link.source}; at most {_ACROSS_SOCKETS / 1e9:g} GB/s between CPUs",
        )
    return link


def _wires(nvml: Any, handle: Any) -> list[str]:
    ends = [
        ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if ask(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, link)
    ]
    return ["" if end is None else _text(end.busId).lower() for end in ends]


def _joined(nvml: Any, one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs are connected by NVLink, directly or through switches."""
    what = (one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return ask(nvml, None, nvml.nvmlDeviceGetP2PStatus, *what) == nvml.NVML_P2P_STATUS_OK


def _pcie(one: Gpu, other: Gpu) -> Link:
    """The narrower of two."""
    generation, lanes = map(min, one.pcie, other.pcie)
    return pcie(generation, max(lanes, 1))
