"""The network interfaces of this host, and what they make of the way to another; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from gradsync.hardware.described.networks import NETWORKS
from gradsync.hardware.description import Link

_SLOWEST = "ethernet-10g"
"""Assumed where the system does not tell the speed, as in most virtual machines."""

_UNKNOWN_SPEED = 65535
"""What some drivers tell instead of nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interfaces:
    """What is up; the loopback does not count."""

    names: tuple[str, ...]
    """Network interfaces."""
    megabits: int
    """Of the fastest, as its driver tells; 0 where none does."""
    infiniband_gigabits: tuple[float, ...]
    """Of each active InfiniBand (or RoCE) port."""


def read_interfaces(root: Path = Path("/")) -> Interfaces:
    """Ask the system.

    Args:
        root: where /sys lies.
    """
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
    """Between this host and its like; pure.

    The rate is what the adapters say of themselves, the latency that of the usual network of their
    kind: `gradsync plan --network` takes measured ones.
    """
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
        return Link(
            name=_SLOWEST,
            alpha_s=usual.alpha_s,
            bytes_per_s=usual.bytes_per_s,
            per_host=True,
            source="assumed: no interface tells its speed",
        )
    return Link(
        name=f"ethernet-{interfaces.megabits / 1000:g}g",
        alpha_s=usual.alpha_s,
        bytes_per_s=usual.bytes_per_s * interfaces.megabits / 10_000,
        per_host=True,
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
