"""The machines to train on, as values, and their capabilities; no torch.

    Hardware
    ├── hosts: Host ── devices: Device
    │            └──── link: Link        between devices of this host (NVLink, PCIe, memory)
    └── network: Link                    between hosts

They are detected (`machine.py`) or described (`catalog.py`, `hardware_file.py`); the planner sees
no difference. The switches that speed them up, by device capability:

    bf16, TF32        tensor cores of compute capability 8.0 (Ampere) and later
    fp16              tensor cores of 7.0 (Volta) and later; it needs a GradScaler
    flash attention   torch's kernel needs 8.0 and later, and 16-bit inputs; torch selects it
                      inside `scaled_dot_product_attention`
    bf16 on a CPU     AMX or AVX-512 BF16 (on Arm: bf16). Without them it is emulated: measured
                      with oneDNN, one thread, a product of 1024 x 512 x 2048, bf16 took 0.40 of
                      fp32's time with AVX-512 BF16 and 2.3 times it without, on the same CPU

Environment variables are suggested, never set; the ones that the user has set are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeVar

from gradsync.errors import ConfigError

Kind = Literal["cuda", "cpu"]


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
    per_host: bool = False
    """For a network: `bytes_per_s` is that of a host's single port, which its ranks share;
    otherwise each rank has a port."""

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
    instructions: tuple[str, ...] = ()
    """Such as avx512_bf16, amx_bf16: they determine how fast bf16 is on the CPU."""


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


T = TypeVar("T")


def runs(values: Iterable[T]) -> Iterator[tuple[T, int]]:
    """Runs of equal neighbours as one value, with their count."""
    for value, same in groupby(values):
        yield value, len(list(same))


_AMPERE, _VOLTA = (8, 0), (7, 0)
_CPU_BF16 = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """The settings to turn on; the same for all devices."""

    dtype: Literal["bf16", "fp16", "fp32"]  # The fastest that every device multiplies in hardware
    tf32: bool = False
    reason: str
    suggestions: tuple[str, ...] = ()
    """`export NAME=value` of variables that may help and are not set, for the user to type."""


def speed_switches(hardware: Hardware, env: Mapping[str, str]) -> Switches:
    """The switches that suit all devices; variables set in `env` are left to the user."""
    if hardware.devices[0].kind == "cpu":
        dtype, reason = "fp32", "fp32: without AMX or AVX-512 BF16 the CPU emulates bf16, slower"
        if all(multiplies_bf16(host.instructions) for host in hardware.hosts):
            fast = next(name for name in _CPU_BF16 if name in hardware.hosts[0].instructions)
            dtype, reason = "bf16", f"bf16: the CPU multiplies it in hardware ({fast})"
        return Switches(dtype=dtype, reason=f"{reason}; fused AdamW; freed memory kept")
    oldest = min(device.compute_capability or (0, 0) for device in hardware.devices)
    dtype, said = "fp32", " has no tensor cores (7.0 has): fp32"
    if oldest >= _AMPERE:
        dtype, said = "bf16", ": bf16, TF32, flash attention"
    elif oldest >= _VOLTA:
        dtype, said = "fp16", " has no bf16 (8.0 has): fp16"
    wanted = {}
    if "PYTORCH_CUDA_ALLOC_CONF" not in env:  # the older name
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if len(hardware.devices) > 1:
        wanted["NCCL_DEBUG"] = "WARN"
    if len(hardware.hosts) > 1 and (interface := env.get("GLOO_SOCKET_IFNAME")):
        # The user's choice for Gloo also suits NCCL; "=" makes NCCL match the exact name.
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return Switches(
        dtype=dtype,
        tf32=oldest >= _AMPERE,
        reason=f"compute capability {oldest[0]}.{oldest[1]}{said}, fused AdamW",
        suggestions=tuple(f"export {n}={value}" for n, value in wanted.items() if n not in env),
    )


def multiplies_bf16(instructions: Collection[str]) -> bool:
    """Whether a CPU with these instructions has bf16 in hardware, without emulation."""
    return any(name in instructions for name in _CPU_BF16)
