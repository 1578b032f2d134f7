"""The machines to train on, as values: devices, hosts, and the links between them; no torch.

    Hardware
    ├── hosts: Host ── devices: Device
    │            └──── link: Link        between devices of this host (NVLink, PCIe, memory)
    └── network: Link                    between hosts

Detected (`detect/machine.py`) or read from a file (`described/file.py`): who plans with it cannot
tell which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gradsync.errors import ConfigError

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Something that one rank trains on: a GPU, a slice of one, or a share of a host's cores.

    Raises:
        ConfigError: no memory, or no arithmetic.
    """

    kind: Kind
    name: str
    """As its maker calls it, such as "NVIDIA H100 80GB HBM3"."""
    memory_bytes: int
    """All of it; for a CPU rank: its share of the host's."""
    peak_flops: float
    """Dense bf16 products at best, floating-point operations per second."""
    free_bytes: int | None = None
    """The part that is not taken now; None: not known, all of it."""
    compute_capability: tuple[int, int] | None = None
    """CUDA devices only, such as (9, 0)."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of its memory."""
    mig: bool = False
    """A slice of a GPU."""
    shared: bool = False
    """Other processes were using it when it was looked at."""
    source: str = ""
    """Where `peak_flops` and `memory_bytes_per_s` come from."""

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(f"device {self.name}: memory must be positive")
        if self.peak_flops <= 0:
            raise ConfigError(f"device {self.name}: peak_flops must be positive")

    @property
    def usable_bytes(self) -> int:
        """Memory that a rank may plan with: the free part where it is known."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between two ranks: `seconds = alpha_s + bytes / bytes_per_s` (Hockney 1994).

    Raises:
        ConfigError: a negative latency, or no bandwidth.
    """

    name: str
    """Such as nvlink4, pcie4, shared memory, infiniband-ndr, ethernet-10g."""
    alpha_s: float
    """Latency of one message, however short."""
    bytes_per_s: float
    """In one direction, of one rank, while all use it."""
    source: str = ""
    """Where the two numbers come from."""
    per_host: bool = False
    """For a network: `bytes_per_s` is that of a host's one port, which its ranks divide among them;
    else each rank has a port of its own."""

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.bytes_per_s <= 0:
            raise ConfigError(f"link {self.name}: alpha_s must be >= 0 and bytes_per_s > 0")

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine.

    Raises:
        ConfigError: no device.
    """

    devices: tuple[Device, ...]
    link: Link
    """Between its devices."""
    cores: int
    """Cores that this user may occupy (affinity and container limit)."""
    memory_bytes: int
    """The host's, or the container's."""
    instructions: tuple[str, ...] = ()
    """Such as avx512_bf16, amx_bf16: what decides how fast bf16 is on the CPU."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that are up, loopback left out."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("a host without devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """All of it.

    Raises:
        ConfigError: no host.
    """

    hosts: tuple[Host, ...]
    network: Link | None = None
    """Between hosts; None where there is one host."""
    notes: tuple[str, ...] = ()
    """How it was found, as far as a reader should know; one line each."""

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigError("hardware without hosts")
        if len(self.hosts) > 1 and self.network is None:
            raise ConfigError(f"{len(self.hosts)} hosts, but no network between them")

    @property
    def devices(self) -> tuple[Device, ...]:
        """All hosts' devices, in rank order."""
        return tuple(device for host in self.hosts for device in host.devices)

    def with_devices(self, count: int) -> Hardware:
        """The same, of which only the first `count` devices are used; 1 <= count."""
        left, hosts = count, []
        for host in self.hosts:
            if left > 0:
                hosts.append(replace(host, devices=host.devices[:left]))
                left -= len(host.devices)
        if left > 0:
            raise ConfigError(f"{count} devices wanted, there are {count - left}")
        return replace(self, hosts=tuple(hosts))
