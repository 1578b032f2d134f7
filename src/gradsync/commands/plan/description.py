"""The machines to train on: as values, and by name with published figures; no torch.

    Hardware
    ├── hosts: Host ── devices: Device
    │            └──── link: Link        between devices of this host (NVLink, PCIe, memory)
    └── network: Link                    between hosts

They are detected (`machine.py`), described in a file (`hardware_file.py`), or named by
DEVICE[xCOUNT][@HOSTS]: `h100x8@2` is two hosts with eight GPUs each. What a name leaves open is
assumed; `Hardware.notes` and `Link.source` say so.

Memory is the data sheet's, in decimal GB. Drivers report a few percent more (an "80 GB" H100 has
85.5e9 bytes), so a plan made here fits there. A link's `bytes_per_s` is below the bus's limit: it
is the figure in NCCL's own model, `src/graph/topo.h` at commit 069a3d4 (SM70_NVLINK_BW …, PCI_BW),
with the latency of `src/graph/tuning.cc` at commit 01afd20 (hwLat; ring, simple protocol).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeVar

from gradsync.core.files import check_name
from gradsync.errors import ConfigError

Kind = Literal["cuda", "cpu"]
GB = 10**9
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device that one rank trains on: a GPU, or a share of a host's cores."""

    kind: Kind
    name: str  # The maker's name, such as "NVIDIA H100 80GB HBM3"
    memory_bytes: int  # All of it; for a CPU rank: its share of the host's memory
    peak_flops: float  # Peak rate of dense bf16 products, floating-point operations per second
    free_bytes: int | None = None  # The free part; None: unknown, so all of it counts
    compute_capability: tuple[int, int] | None = None
    memory_bytes_per_s: float | None = None
    source: str = ""  # Origin of `peak_flops` and `memory_bytes_per_s`

    @property
    def usable_bytes(self) -> int:
        """Memory that a rank may plan with: the free part if known."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between two ranks: `seconds = alpha_s + bytes / bytes_per_s` (Hockney 1994)."""

    name: str  # Such as nvlink4, pcie4, shared memory, infiniband-ndr, ethernet-10g
    alpha_s: float  # Latency of one message, however short
    bytes_per_s: float  # In one direction, per rank, while all ranks use it
    source: str = ""  # Origin of the two numbers
    per_host: bool = False  # Whether the ranks of a host share one port of the network

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine."""

    devices: tuple[Device, ...]
    link: Link
    cores: int  # Cores that this user may occupy (affinity and container limit)
    memory_bytes: int  # The host's, or the container's
    instructions: tuple[str, ...] = ()  # Such as amx_bf16: they decide how fast bf16 is on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """All hosts, in rank order."""

    hosts: tuple[Host, ...]
    network: Link | None = None  # None for a single host
    notes: tuple[str, ...] = ()  # How it was found, one line per fact that a reader should know

    def __post_init__(self) -> None:
        if len(self.hosts) > 1 and self.network is None:
            raise ConfigError(f"{len(self.hosts)} hosts need a network (--network, or in the file)")

    @property
    def devices(self) -> tuple[Device, ...]:
        """All hosts' devices, in rank order."""
        return tuple(device for host in self.hosts for device in host.devices)

    def with_devices(self, count: int) -> Hardware:
        """The same hardware with only the first `count` devices; 1 <= count."""
        left, hosts = count, []
        for host in self.hosts:
            if left > 0:
                hosts.append(replace(host, devices=host.devices[:left]))
                left -= len(host.devices)
        if left > 0:
            raise ConfigError(f"{count} devices wanted, there are {count - left}")
        return replace(self, hosts=tuple(hosts))


def gb(num_bytes: float) -> str:
    """Gigabytes of 10**9 bytes, as in data sheets."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def runs(values: Iterable[T]) -> Iterator[tuple[T, int]]:
    """Runs of equal neighbours as one value, with their count."""
    for value, same in groupby(values):
        yield value, len(list(same))


_CPU_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Without one of them (the last is Arm's) bf16 is emulated: measured with oneDNN, one thread, a
product of 1024 x 512 x 2048 took 0.40 of fp32's time with AVX-512 BF16 and 2.3 times it without."""


def multiplies_bf16(instructions: Collection[str]) -> bool:
    """Whether a CPU with these instructions has bf16 in hardware, without emulation."""
    return any(name in instructions for name in _CPU_BF16)


def fast_switches(hardware: Hardware) -> tuple[Literal["bf16", "fp32"], str]:
    """The dtype to train in on all devices, and what speeds them up: TF32, bf16 and torch's flash
    attention need compute capability 8.0 (Ampere)."""
    if hardware.devices[0].kind == "cpu":
        if all(multiplies_bf16(host.instructions) for host in hardware.hosts):
            return "bf16", "bf16, which the CPU multiplies in hardware; fused AdamW"
        return "fp32", "fp32: without AMX or AVX-512 BF16 the CPU emulates bf16; fused AdamW"
    oldest = min(device.compute_capability or (0, 0) for device in hardware.devices)
    said = f"compute capability {oldest[0]}.{oldest[1]}"
    if oldest >= (8, 0):
        return "bf16", f"{said}: bf16, TF32, flash attention, fused AdamW"
    return "fp32", f"{said} has no bf16: fp32 (7.0 and later: --dtype fp16), fused AdamW"


_NVLINK_ALPHA_S, _PCIE_ALPHA_S, _NETWORK_ALPHA_S = 3.4e-6, 5.7e-6, 9.6e-6
_NCCL = "NCCL's own model of a ring's step (src/graph/tuning.cc)"
_TCP_PART = 1448 / 1538
"""Payload of a full Ethernet frame: 1500 bytes less IP, TCP and time stamps (52), over 1500 and its
38 bytes of header, check sum, preamble and gap (IEEE 802.3)."""


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


_INSIDE = (
    *(
        Link(
            name=f"nvlink{generation}",
            alpha_s=_NVLINK_ALPHA_S,
            bytes_per_s=links * gb_per_s * 1e9,
            source=f"NCCL's own figure for {links} links; one direction",
        )
        for generation, links, gb_per_s in ((3, 12, 20), (4, 18, 20.6), (5, 18, 40.1))
    ),
    *(
        Link(
            name=f"pcie{generation}",
            alpha_s=_PCIE_ALPHA_S,
            bytes_per_s=16 * 0.75e9 * 2 ** (generation - 3),
            source="NCCL's own figure for x16; one direction",
        )
        for generation in (3, 4, 5)
    ),
)
LINKS = {link.name: link for link in _INSIDE}
_BETWEEN_HOSTS = (
    *(infiniband("infiniband-hdr", 200), infiniband("infiniband-ndr", 400)),
    *(ethernet(gigabits) for gigabits in (10, 25, 100)),
)
NETWORKS = LINKS | {link.name: link for link in _BETWEEN_HOSTS}
"""Not measured here. TCP's latency over Ethernet exceeds NCCL's figure if the kernel is slow:
measure it with `gradsync bench collectives`, and write a file."""


def _gpu(
    name: str,
    memory_gb: int,
    tflops: float,
    gb_per_s: float,
    capability: tuple[int, int],
    *,
    source: str = "NVIDIA data sheet",
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


_PAPER = "NVIDIA architecture white paper"
_FP16 = "NVIDIA data sheet; fp16, it has no bf16 units"
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
"""By the name that users type."""
_JOINED_BY = {
    **{"b200": "nvlink5", "h200": "nvlink4", "h100": "nvlink4"},
    **{"a100-80": "nvlink3", "a100-40": "nvlink3"},
}
"""The NVLinks of the usual host; others need a bridge."""

CORES_PER_DEVICE = 16
MEMORY_PER_DEVICE = 128 * GB
DEFAULT_NETWORK = "infiniband-hdr"
"""Assumed for hosts given only by name: those of NVIDIA's DGX A100, of eight devices."""

_NAME = re.compile(r"(.+?)(?:x([1-9]\d{0,2}))?(?:@([1-9]\d{0,3}))?", re.ASCII)
"""The count has at most three digits: rtx4090 is no count."""


def device_of(key: str) -> Device:
    """A catalogued device: `h100`, `a100-40`. ConfigError names the known devices."""
    check_name("device", key, DEVICES)
    return DEVICES[key]


def named_hardware(name: str) -> Hardware:
    """The machine called `name`; ConfigError for an unknown device."""
    found = _NAME.fullmatch(name)
    key, count, hosts = found.groups() if found else (name, None, None)
    host = usual_host([device_of(key)] * int(count or 1))
    num_hosts = int(hosts or 1)
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


def usual_host(devices: Sequence[Device]) -> Host:
    """A host about which only its devices are known."""
    return Host(
        devices=tuple(devices),
        link=usual_link(devices),
        cores=CORES_PER_DEVICE * len(devices),
        memory_bytes=MEMORY_PER_DEVICE * len(devices),
    )


def usual_link(devices: Sequence[Device]) -> Link:
    """NVLink if all devices are of one kind that has it, else PCIe as old as the oldest one's."""
    names = {device.name for device in devices}
    for key, link in _JOINED_BY.items():
        if names == {DEVICES[key].name}:
            return LINKS[link]
    oldest = min(device.compute_capability or (0, 0) for device in devices)
    generation = 3 if oldest < (8, 0) else 4 if oldest < (9, 0) else 5
    return LINKS[f"pcie{generation}"]
