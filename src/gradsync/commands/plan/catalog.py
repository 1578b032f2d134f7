"""Devices and links with published figures, and machines named after them, as `a100-80x8@2`.

    NAME = PART[+PART …][@HOSTS]        PART = DEVICE[xCOUNT]

`h100x4` is one host with four GPUs; `a100-40x2+h100` one host with three of two kinds; `h100x8@2`
two such hosts. What a name leaves open is assumed; `Hardware.notes` and `Link.source` say so.

Memory is the data sheet's, in decimal GB. Drivers report a few percent more (an "80 GB" H100 has
85.5e9 bytes), so a plan made here fits there. A link's `bytes_per_s` is below the bus's limit: it
is the figure in NCCL's own model, `src/graph/topo.h` at commit 069a3d4 (SM70_NVLINK_BW …, PCI_BW),
with the latency of `src/graph/tuning.cc` at commit 01afd20 (hwLat; ring, simple protocol).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.errors import ConfigError

GB = 10**9

_NVLINK = {7: (2, 25e9, 20e9), 8: (3, 25e9, 20e9), 9: (4, 25e9, 20.6e9), 10: (5, 50e9, 40.1e9)}
"""By major compute capability: generation, and the bytes per second of one link in one direction,
by the specification and by NCCL."""
_PCIE_LANE = 0.75e9
"""One lane of PCIe 3, one direction, NCCL's figure; each generation doubles it."""
_NVLINK_ALPHA_S, _PCIE_ALPHA_S, _NETWORK_ALPHA_S = 3.4e-6, 5.7e-6, 9.6e-6
_NCCL = "NCCL's own model of a ring's step (src/graph/tuning.cc)"
_TCP_PART = 1448 / 1538
"""Payload of a full Ethernet frame: 1500 bytes less IP, TCP and time stamps (52), over 1500 and its
38 bytes of header, check sum, preamble and gap (IEEE 802.3)."""


def nvlink(capability: tuple[int, int], links: int) -> Link:
    """`links` parallel NVLinks between devices of this compute capability."""
    generation, specified, reckoned = _NVLINK[min(max(capability[0], 7), 10)]
    return Link(
        name=f"nvlink{generation}",
        alpha_s=_NVLINK_ALPHA_S,
        bytes_per_s=links * reckoned,
        source=(
            f"NCCL's own figure for {links} links, "
            f"{links * specified / 1e9:.4g} GB/s as specified; one direction"
        ),
    )


def pcie(generation: int, lanes: int = 16) -> Link:
    """PCI express, between devices of one host."""
    return Link(
        name=f"pcie{generation}",
        alpha_s=_PCIE_ALPHA_S,
        bytes_per_s=lanes * _PCIE_LANE * 2 ** (generation - 3),
        source=f"NCCL's own figure for x{lanes}; one direction",
    )


def infiniband(name: str, gigabits: float) -> Link:
    """A port per GPU."""
    source = f"InfiniBand Trade Association's rate, 4 lanes, a port per GPU; latency: {_NCCL}"
    return Link(name=name, alpha_s=_NETWORK_ALPHA_S, bytes_per_s=gigabits * 1e9 / 8, source=source)


def ethernet(gigabits: float) -> Link:
    """TCP over one port a host."""
    return Link(
        name=f"ethernet-{gigabits:g}g",
        alpha_s=_NETWORK_ALPHA_S,
        bytes_per_s=gigabits * 1e9 / 8 * _TCP_PART,
        per_host=True,
        source=f"line rate less the headers of TCP, one port a host; latency: {_NCCL}",
    )


LINKS = {
    "nvlink3": nvlink((8, 0), 12),
    "nvlink4": nvlink((9, 0), 18),
    "nvlink5": nvlink((10, 0), 18),
    **{f"pcie{generation}": pcie(generation) for generation in (3, 4, 5)},
}
"""By the name that users type: all links of one device, and PCIe with 16 lanes."""

_BETWEEN_HOSTS = (
    infiniband("infiniband-hdr", 200),
    infiniband("infiniband-ndr", 400),
    *(ethernet(gigabits) for gigabits in (10, 25, 100)),
)
NETWORKS = LINKS | {link.name: link for link in _BETWEEN_HOSTS}
"""Not measured here. TCP's latency over Ethernet exceeds NCCL's figure if the kernel is slow:
measure it with `gradsync bench collectives`, and write a file."""

_SHEET = "NVIDIA data sheet"
_PAPER = "NVIDIA architecture white paper"
_FP16 = f"{_SHEET}; fp16, it has no bf16 units"


def _gpu(
    name: str,
    memory_gb: int,
    tflops: float,
    gb_per_s: float,
    capability: tuple[int, int],
    *,
    source: str = _SHEET,
) -> Device:
    """A product by the driver's name for it. `tflops`: dense bf16 products with fp32 sums; figures
    for sparse matrices, which are twice as high, are halved. `gb_per_s`: of its memory."""
    return Device(
        kind="cuda",
        name=name,
        memory_bytes=memory_gb * GB,
        peak_flops=tflops * 1e12,
        compute_capability=capability,
        memory_bytes_per_s=gb_per_s * 1e9,
        source=source,
    )


DEVICES = {
    "b200": _gpu("NVIDIA B200", 180, 2250, 7700, (10, 0)),
    "h200": _gpu("NVIDIA H200", 141, 989.5, 4800, (9, 0)),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 80, 989.5, 3350, (9, 0)),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", 80, 312, 2039, (8, 0)),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", 40, 312, 1555, (8, 0)),
    "a10": _gpu("NVIDIA A10", 24, 125, 600, (8, 6)),
    "l40s": _gpu("NVIDIA L40S", 48, 362, 864, (8, 9)),
    "l4": _gpu("NVIDIA L4", 24, 121, 300, (8, 9)),
    "t4": _gpu("Tesla T4", 16, 65, 300, (7, 5), source=_FP16),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 24, 165.2, 1008, (8, 9), source=_PAPER),
}
"""By the name that users type; all of the memory counts as free."""
_JOINED_BY = {
    **{"b200": "nvlink5", "h200": "nvlink4", "h100": "nvlink4"},
    **{"a100-80": "nvlink3", "a100-40": "nvlink3"},
}
"""The NVLinks of the usual host; others need a bridge."""

CORES_PER_DEVICE = 16
MEMORY_PER_DEVICE = 128 * GB
"""Assumed for a host given only by name: NVIDIA's DGX A100 has 128 cores and 1 TB for 8 devices."""
DEFAULT_NETWORK = "infiniband-hdr"
"""Between hosts given only by name; DGX A100 has it, one port per device."""

_NAME = re.compile(r"(.*?)(?:@([1-9]\d{0,3}))?", re.ASCII)
_PART = re.compile(r"(.+?)(?:x([1-9]\d{0,2}))?", re.ASCII)  # rtx4090 has four digits
_FLOP_PER_CYCLE = {
    **{(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}
"""Dense 16-bit products with fp32 sums, of one multiprocessor, by compute capability. From the
white papers' peak / (multiprocessors x boost clock), such as 312e12 / (108 x 1.41e9) = 2049. If
GeForce parts run at half the rate of professional ones, the GeForce figure."""
_OTHERS = 512
_USUAL_CLOCK_HZ = 1.5e9


def detected_device(
    name: str, capability: tuple[int, int], num_sms: int, clock_hz: float | None, **told: Any
) -> Device:
    """A device with the data sheet's rates for its driver's name, else estimated from the other
    arguments (None: unknown clock). Memory and other `told` values stay unchanged."""
    for known in DEVICES.values():
        if known.name.removeprefix("NVIDIA ") == name.removeprefix("NVIDIA "):  # as older drivers
            rates = known.peak_flops, known.memory_bytes_per_s, known.source
            break
    else:
        clock, assumed = clock_hz or _USUAL_CLOCK_HZ, "" if clock_hz else " (assumed)"
        source = (
            f"estimate: {num_sms} multiprocessors of compute capability "
            f"{capability[0]}.{capability[1]} x {clock / 1e9:.3g} GHz{assumed}"
        )
        rates = _FLOP_PER_CYCLE.get(capability, _OTHERS) * num_sms * clock, None, source
    flops, memory_rate, source = rates
    return Device(
        kind="cuda",
        name=name,
        compute_capability=capability,
        peak_flops=flops,
        memory_bytes_per_s=memory_rate,
        source=source,
        **told,
    )


def device_of(key: str) -> Device:
    """A catalogued device: `h100`, `a100-40`. ConfigError names the known devices."""
    if key not in DEVICES:
        there = ", ".join(DEVICES)
        raise ConfigError(f"unknown device {key!r} (there are: {there}; a file describes others)")
    return DEVICES[key]


def hardware_of(name: str) -> Hardware:
    """The machine called `name`; ConfigError for an unknown device."""
    found = _NAME.fullmatch(name)
    parts, hosts = found.groups() if found else (name, None)
    num_hosts = int(hosts or 1)
    notes = [
        f"assumed: {CORES_PER_DEVICE} cores and {MEMORY_PER_DEVICE // GB} GB of host memory per "
        "device"
    ]
    if num_hosts > 1:
        notes.append(f"assumed: {DEFAULT_NETWORK} between the hosts")
    return Hardware(
        hosts=(host_of(parts),) * num_hosts,
        network=NETWORKS[DEFAULT_NETWORK] if num_hosts > 1 else None,
        notes=tuple(notes),
    )


def host_of(name: str) -> Host:
    """One host with the devices of `PART[+PART …]`, and its links, cores and memory."""
    devices: list[Device] = []
    for part in name.split("+"):
        found = _PART.fullmatch(part)
        key, count = found.groups() if found else (part, None)
        devices += [device_of(key)] * int(count or 1)
    return usual_host(devices)


def usual_host(devices: Sequence[Device]) -> Host:
    """A host about which only its devices are known."""
    joined = {DEVICES[key].name: link for key, link in _JOINED_BY.items()}
    names = {device.name for device in devices}
    link = joined.get(devices[0].name) if len(names) == 1 else None  # NVLink joins one kind
    return Host(
        devices=tuple(devices),
        link=LINKS[link] if link else pcie_of(devices),
        cores=CORES_PER_DEVICE * len(devices),
        memory_bytes=MEMORY_PER_DEVICE * len(devices),
    )


def pcie_of(devices: Sequence[Device]) -> Link:
    """The PCIe link of GPUs, by the oldest one's compute capability."""
    oldest = min(device.compute_capability or (0, 0) for device in devices)
    generation = 3 if oldest < (8, 0) else 4 if oldest < (9, 0) else 5
    return LINKS[f"pcie{generation}"]
