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
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.errors import ConfigError

GB = 10**9

_NCCL = "NCCL's own model of a ring's step (src/graph/tuning.cc)"
_NETWORK_S = 9.6e-6  # `_NCCL`, a step between hosts with protocol Simple, seconds
_NVLINK_ALPHA_S, _PCIE_ALPHA_S = 3.4e-6, 5.7e-6
_TCP_PART = 1448 / 1538
"""Payload of a full Ethernet frame: 1500 bytes less IP, TCP and time stamps (52), over 1500 and its
38 bytes of header, check sum, preamble and gap (IEEE 802.3)."""

_NVLINK = {2: (25e9, 20e9), 3: (25e9, 20e9), 4: (25e9, 20.6e9), 5: (50e9, 40.1e9)}
"""One link, one direction, bytes per second: the specification's, and NCCL's figure."""
_GA102_NVLINK = (14.0625e9, 12e9)  # NVLink 3 as in RTX 3090, A40 and A6000 (compute capability 8.6)
_GENERATIONS = {(7, 0): 2, (7, 2): 2, (7, 5): 2, (8, 0): 3, (8, 6): 3, (9, 0): 4, (10, 0): 5}
"""NVLink by compute capability."""
_NEWEST_NVLINK = 5
_PCIE_LANE = {generation: 0.75e9 * 2 ** (generation - 3) for generation in range(1, 7)}
"""One lane, one direction, NCCL's figure: 12 GB/s for PCIe 3 x16, doubling each generation."""


def nvlink(capability: tuple[int, int], links: int) -> Link:
    """`links` parallel NVLinks between devices of this compute capability."""
    newest = _NEWEST_NVLINK if capability >= (10, 0) else 2
    generation = _GENERATIONS.get(capability, newest)
    specified, reckoned = _GA102_NVLINK if capability == (8, 6) else _NVLINK[generation]
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
    generation = min(max(generation, 1), max(_PCIE_LANE))
    return Link(
        name=f"pcie{generation}",
        alpha_s=_PCIE_ALPHA_S,
        bytes_per_s=lanes * _PCIE_LANE[generation],
        source=f"NCCL's own figure for x{lanes}; one direction",
    )


def _infiniband(name: str, gigabits: float) -> Link:
    source = f"InfiniBand Trade Association's rate, 4 lanes, a port per GPU; latency: {_NCCL}"
    return Link(name=name, alpha_s=_NETWORK_S, bytes_per_s=gigabits * 1e9 / 8, source=source)


def _tcp(name: str, gigabits: float, latency_s: float | None = None) -> Link:
    """Ethernet, or a wide-area link whose name states the latency."""
    source = "line rate less the headers of TCP, one port a host"
    known = latency_s is not None
    return Link(
        name=name,
        alpha_s=latency_s if known else _NETWORK_S,
        bytes_per_s=gigabits * 1e9 / 8 * _TCP_PART,
        per_host=True,
        source=f"as its name says, one way; {source}" if known else f"{source}; latency: {_NCCL}",
    )


LINKS = {
    "nvlink2": nvlink((7, 0), 6),
    "nvlink3": nvlink((8, 0), 12),
    "nvlink4": nvlink((9, 0), 18),
    "nvlink5": nvlink((10, 0), 18),
    **{f"pcie{generation}": pcie(generation) for generation in (3, 4, 5, 6)},
}
"""By the name that users type: all links of one device, and PCIe with 16 lanes."""

NETWORKS: dict[str, Link] = {
    link.name: link
    for link in (
        *LINKS.values(),
        _infiniband("infiniband-hdr", 200),
        _infiniband("infiniband-ndr", 400),
        _tcp("ethernet-10g", 10),
        _tcp("ethernet-25g", 25),
        _tcp("ethernet-100g", 100),
        _tcp("wan-1g-50ms", 1, 0.050),
        _tcp("wan-100m-100ms", 0.1, 0.100),
    )
}
"""Not measured here. TCP's latency over Ethernet exceeds NCCL's figure if the kernel is slow:
measure it with `gradsync bench collectives`, and write a file."""


class Model(NamedTuple):
    """A product, as its data sheet describes it."""

    name: str  # The driver's name for it
    memory_gb: int
    tflops: float
    """Dense bf16 products (fp16 if the device has no bf16) with fp32 sums; 1e12 per second. Figures
    for sparse matrices, which are twice as high, are halved."""
    gb_per_s: float  # Bandwidth of its memory; 1e9 bytes per second
    capability: tuple[int, int]
    link: str
    """Key in `LINKS`: to the usual host's other devices; PCIe if NVLink needs a bridge."""
    source: str

    def device(self) -> Device:
        """The device with all of its memory free."""
        return Device(
            kind="cuda",
            name=self.name,
            memory_bytes=self.memory_gb * GB,
            peak_flops=self.tflops * 1e12,
            compute_capability=self.capability,
            memory_bytes_per_s=self.gb_per_s * 1e9,
            source=self.source,
        )


_SHEET = "NVIDIA data sheet"
_PAPER = "NVIDIA architecture white paper"
_FP16 = f"{_SHEET}; fp16, it has no bf16 units"

MODELS = {
    "b200": Model("NVIDIA B200", 180, 2250, 7700, (10, 0), "nvlink5", _SHEET),
    "h200": Model("NVIDIA H200", 141, 989.5, 4800, (9, 0), "nvlink4", _SHEET),
    "h100": Model("NVIDIA H100 80GB HBM3", 80, 989.5, 3350, (9, 0), "nvlink4", _SHEET),
    "a100-80": Model("NVIDIA A100-SXM4-80GB", 80, 312, 2039, (8, 0), "nvlink3", _SHEET),
    "a100-40": Model("NVIDIA A100-SXM4-40GB", 40, 312, 1555, (8, 0), "nvlink3", _SHEET),
    "a10": Model("NVIDIA A10", 24, 125, 600, (8, 6), "pcie4", _SHEET),
    "l40s": Model("NVIDIA L40S", 48, 362, 864, (8, 9), "pcie4", _SHEET),
    "l4": Model("NVIDIA L4", 24, 121, 300, (8, 9), "pcie4", _SHEET),
    "t4": Model("Tesla T4", 16, 65, 300, (7, 5), "pcie3", _FP16),
    "v100-16": Model("Tesla V100-SXM2-16GB", 16, 125, 900, (7, 0), "nvlink2", _FP16),
    "rtx4090": Model("NVIDIA GeForce RTX 4090", 24, 165.2, 1008, (8, 9), "pcie4", _PAPER),
}
"""By the name that users type."""

MAX_DEVICES = 2**17  # In all; a typo must not fill the memory
CORES_PER_DEVICE = 16
MEMORY_PER_DEVICE = 128 * GB
"""Assumed for a host given only by name: NVIDIA's DGX A100 has 128 cores and 1 TB for 8 devices."""
DEFAULT_NETWORK = "infiniband-hdr"
"""Between hosts given only by name; DGX A100 has it, one port per device."""

_PART = re.compile(r"(.+)x(\d{1,9})", re.ASCII)
_FLOP_PER_CYCLE = {
    **{(7, 0): 1024, (7, 2): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 7): 1024},
    **{(8, 9): 512, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 512, (12, 1): 512},
}
"""Dense 16-bit products with fp32 sums, of one multiprocessor, by compute capability. From the
white papers' peak / (multiprocessors x boost clock), such as 312e12 / (108 x 1.41e9) = 2049. If
GeForce parts run at half the rate of professional ones, the GeForce figure."""
_OLDER, _NEWER = 128, 512
"""For capabilities that are missing from the table."""
_USUAL_CLOCK_HZ = 1.5e9


def by_driver_name(name: str) -> Model | None:
    """The model of a device that calls itself `name`; None if no data sheet is known for it. Older
    drivers omit the vendor."""
    wanted = name.strip().lower().removeprefix("nvidia ")
    names = {model.name.lower().removeprefix("nvidia "): model for model in MODELS.values()}
    return names.get(wanted)


def device_of(key: str) -> Device:
    """A catalogued device: `h100`, `a100-40`."""
    if key in MODELS:
        return MODELS[key].device()
    family = [name for name in MODELS if name.startswith(f"{key}-")]
    near = family or get_close_matches(key, MODELS, n=2)
    hint = f"; perhaps {' or '.join(near)}" if near else ""
    raise ConfigError(
        f"unknown device {key!r}{hint} (there are: {', '.join(MODELS)}; a file describes others)"
    )


def detected_device(
    name: str, capability: tuple[int, int], num_sms: int, clock_hz: float | None, **told: Any
) -> Device:
    """A device with the data sheet's rates for its driver's name, else estimated from the other
    arguments (None: unknown clock). Memory and other `told` values stay unchanged."""
    model = by_driver_name(name)
    if model is not None:
        flops, rate, source = model.tflops * 1e12, model.gb_per_s * 1e9, model.source
    else:
        clock, assumed = clock_hz or _USUAL_CLOCK_HZ, "" if clock_hz else " (assumed)"
        flops, rate = estimated_flops(capability, num_sms, clock), None
        source = (
            f"estimate: {num_sms} multiprocessors of compute capability "
            f"{capability[0]}.{capability[1]} x {clock / 1e9:.3g} GHz{assumed}"
        )
    rates = {"peak_flops": flops, "memory_bytes_per_s": rate, "source": source}
    return Device(kind="cuda", name=name, compute_capability=capability, **rates, **told)


def estimated_flops(capability: tuple[int, int], num_sms: int, clock_hz: float) -> float:
    """Peak of a device without a data sheet here, from its generation, size and clock."""
    other = _NEWER if capability >= (7, 0) else _OLDER
    return _FLOP_PER_CYCLE.get(capability, other) * num_sms * clock_hz


def hardware_of(name: str) -> Hardware:
    """The machine called `name`; for an unknown device, ConfigError names the nearest one."""
    parts, at, hosts = name.partition("@")
    if at and (re.fullmatch(r"[1-9]\d{0,8}", hosts, re.ASCII) is None):
        raise ConfigError(
            f"hardware {name!r}: got {hosts!r} after @, expected a number of hosts, as in h100x8@2"
        )
    num_hosts = int(hosts) if at else 1
    host = host_of(parts)
    check_size(num_hosts * len(host.devices), f"hardware {name!r}")
    notes = [
        f"assumed: {CORES_PER_DEVICE} cores and {MEMORY_PER_DEVICE // GB} GB of host memory per "
        "device"
    ]
    if num_hosts > 1:
        notes.append(f"assumed: {DEFAULT_NETWORK} between the hosts")
    return Hardware(
        hosts=(host,) * num_hosts,
        network=NETWORKS[DEFAULT_NETWORK] if num_hosts > 1 else None,
        notes=tuple(notes),
    )


def host_of(name: str) -> Host:
    """One host with the devices of `PART[+PART …]`, and its links, cores and memory."""
    devices: list[tuple[str, Device]] = []
    for part in name.split("+"):
        key, count, found = part, 1, _PART.fullmatch(part)
        if part not in MODELS and found is not None:  # the x of rtx4090 is no separator
            key, count = found[1], int(found[2])
        if count < 1:
            raise ConfigError(f"hardware {part!r}: a count must be at least 1")
        check_size(len(devices) + count, f"hardware {name!r}")
        devices += [(key, device_of(key))] * count
    return usual_host(devices)


def usual_host(devices: Sequence[tuple[str, Device]]) -> Host:
    """A host about which only its devices are known; each comes with its name in the catalogue, ""
    for a device that is not in it."""
    keys = {key for key, _ in devices}
    if len(keys) == 1 and keys < MODELS.keys():
        link = LINKS[MODELS[keys.pop()].link]
    else:  # NVLink joins only devices of the same kind
        link = pcie_of(device for _, device in devices)
    return Host(
        devices=tuple(device for _, device in devices),
        link=link,
        cores=CORES_PER_DEVICE * len(devices),
        memory_bytes=MEMORY_PER_DEVICE * len(devices),
    )


def pcie_of(devices: Iterable[Device]) -> Link:
    """The PCIe link of GPUs, by the oldest one's compute capability."""
    oldest = min(device.compute_capability or (0, 0) for device in devices)
    generation = 3 if oldest < (8, 0) else 4 if oldest < (9, 0) else 5
    return LINKS[f"pcie{generation}"]


def check_size(num_devices: int, where: str) -> None:
    """Refuse more devices than any machine has."""
    if num_devices > MAX_DEVICES:
        raise ConfigError(f"{where}: {num_devices} devices; at most {MAX_DEVICES} can be described")
