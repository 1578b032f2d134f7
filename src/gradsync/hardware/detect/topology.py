"""How the GPUs of a host reach each other: NVLink where there is some, else PCIe; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from gradsync.hardware.described.links import nvlink, pcie
from gradsync.hardware.description import Link
from gradsync.hardware.detect.nvml import Gpu, ask
from gradsync.hardware.detect.visible import Visible

_ACROSS_SOCKETS = 10e9
"""Bytes per second: NCCL's figure for two Skylake CPUs (`src/graph/topo.h`, SKL_QPI_BW). Newer ones
do more, but the driver does not say which they are."""
_USUAL_GENERATION, _USUAL_LANES = 3, 16


def host_link(nvml: Any, visible: Sequence[Visible], gpus: Sequence[Gpu]) -> tuple[Link, str]:
    """The slowest link between two of the visible devices; of one device, its PCIe.

    Args:
        nvml: `pynvml`, initialised.
        visible: at least one.
        gpus: all of the host: NVLinks that lead to none of them lead to a switch.

    Returns:
        The link, whose source names the pair, and a line on all pairs, "" when they are alike.
    """
    if len(visible) == 1:
        alone = _pcie(nvml, visible[0].gpu, visible[0].gpu)
        return replace(alone, source=f"the one device's own; {alone.source}"), ""
    wires = {gpu.index: _wires(nvml, gpu) for gpu in gpus}
    by_gpus: dict[tuple[int, int, bool], Link] = {}
    pairs: list[tuple[Link, int, int]] = []
    for (i, one), (j, other) in combinations(enumerate(visible), 2):
        sliced = one.gpu.mig or other.gpu.mig
        key = (one.gpu.index, other.gpu.index, sliced)
        if key not in by_gpus:
            by_gpus[key] = _between(nvml, one.gpu, other.gpu, wires, gpus)
        pairs.append((by_gpus[key], i, j))
    slowest, i, j = min(pairs, key=lambda pair: pair[0].bytes_per_s)
    counts = Counter(link.name for link, _, _ in pairs)
    note = ""
    if len({link.bytes_per_s for link, _, _ in pairs}) > 1:
        all_pairs = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        note = f"pairs of devices by link: {all_pairs}; plans reckon with the slowest, {i} to {j}"
    which = f"devices {i} and {j}, the slowest pair" if note else "every pair of devices"
    return replace(slowest, source=f"{which}; {slowest.source}"), note


def _between(
    nvml: Any, one: Gpu, other: Gpu, wires: dict[int, list[str]], gpus: Sequence[Gpu]
) -> Link:
    """Of two GPUs. Slices, also of one GPU, have neither NVLink nor direct access to each other."""
    if not (one.mig or other.mig or one.index == other.index):
        there = _bus(nvml, other)
        links = wires[one.index].count(there)
        if not links and _joined(nvml, one, other):
            known = {_bus(nvml, gpu) for gpu in gpus}
            links = min(sum(end not in known for end in wires[gpu.index]) for gpu in (one, other))
        if links and one.device.compute_capability is not None:
            return nvlink(one.device.compute_capability, links)
    link = _pcie(nvml, one, other)
    level = ask(nvml, 0, nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle)
    if one.index != other.index and level >= nvml.NVML_TOPOLOGY_SYSTEM:
        return replace(
            link,
            name=f"{link.name} across sockets",
            bytes_per_s=min(link.bytes_per_s, _ACROSS_SOCKETS),
            source=f"{link.source}; at most {_ACROSS_SOCKETS / 1e9:g} GB/s between CPUs",
        )
    return link


def _wires(nvml: Any, gpu: Gpu) -> list[str]:
    """PCI bus id of what each NVLink of `gpu` that is up leads to, "" where it is not told."""
    up = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if ask(nvml, 0, nvml.nvmlDeviceGetNvLinkState, gpu.handle, link)
    ]
    ends = [ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, gpu.handle, link) for link in up]
    return [_bus_text(end) if end is not None else "" for end in ends]


def _joined(nvml: Any, one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs reach each other over NVLink, directly or through switches."""
    status = ask(
        nvml,
        None,
        nvml.nvmlDeviceGetP2PStatus,
        *(one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK),
    )
    return status == nvml.NVML_P2P_STATUS_OK


def _pcie(nvml: Any, one: Gpu, other: Gpu) -> Link:
    """The narrower of two: what GPU and slot can do at most, as they slow down to save power."""
    handles = (one.handle, other.handle)
    generations = [
        ask(nvml, _USUAL_GENERATION, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        for handle in handles
    ]
    lanes = [
        ask(nvml, _USUAL_LANES, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) for handle in handles
    ]
    return pcie(min(generations), max(min(lanes), 1))


def _bus(nvml: Any, gpu: Gpu) -> str:
    info = ask(nvml, None, nvml.nvmlDeviceGetPciInfo, gpu.handle)
    return f"GPU {gpu.index}" if info is None else _bus_text(info)


def _bus_text(info: Any) -> str:
    bus = info.busId
    return (bus.decode() if isinstance(bus, bytes) else bus).lower()
