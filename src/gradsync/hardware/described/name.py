"""Machines by name, such as `h100x4` or `a100-80x8@2`, from the catalogue; pure.

    NAME = PART[+PART …][@HOSTS]        PART = DEVICE[xCOUNT]

`h100x4` is one host with four; `a100-40x2+h100` one host with three, of two kinds; `h100x8@2` two
such hosts. What a name leaves open is assumed, and said in `Hardware.notes` and `Link.source`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradsync.errors import ConfigError
from gradsync.hardware.described.catalog import GB, MODELS, device_of
from gradsync.hardware.described.links import LINKS
from gradsync.hardware.described.networks import NETWORKS
from gradsync.hardware.description import Device, Hardware, Host, Link

MAX_DEVICES = 2**17
"""In all; so that a slip of the finger does not fill the memory."""

CORES_PER_DEVICE = 16
MEMORY_PER_DEVICE = 128 * GB
"""Of a host that is only named: NVIDIA's DGX A100 has 128 cores and 1 TB for 8 devices."""

DEFAULT_NETWORK = "infiniband-hdr"
"""Of `networks.NETWORKS`: between hosts that are only named. DGX A100 has it, a port per device."""

_PART = re.compile(r"(.+)x(\d{1,9})", re.ASCII)


def hardware_of(name: str) -> Hardware:
    """The machine called `name`.

    Raises:
        ConfigError: unknown device (the message has the nearest), no such form.
    """
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
        "device, as in NVIDIA's DGX A100"
    ]
    if num_hosts > 1:
        notes.append(f"assumed: {DEFAULT_NETWORK} between the hosts")
    return Hardware(
        hosts=(host,) * num_hosts,
        network=NETWORKS[DEFAULT_NETWORK] if num_hosts > 1 else None,
        notes=tuple(notes),
    )


def host_of(name: str) -> Host:
    """One host with the devices of `PART[+PART …]`, and what comes with them.

    Raises:
        ConfigError: as `hardware_of`.
    """
    devices: list[tuple[str, Device]] = []
    for part in name.split("+"):
        key, count = _device_and_count(part)
        check_size(len(devices) + count, f"hardware {name!r}")
        devices += [(key, device_of(key))] * count
    return usual_host(devices)


def usual_host(devices: Sequence[tuple[str, Device]]) -> Host:
    """A host with such devices, of which nothing else is known.

    Args:
        devices: with their names in the catalogue, "" for what is not in it.
    """
    return Host(
        devices=tuple(device for _, device in devices),
        link=_usual_link(devices),
        cores=CORES_PER_DEVICE * len(devices),
        memory_bytes=MEMORY_PER_DEVICE * len(devices),
    )


def _usual_link(devices: Sequence[tuple[str, Device]]) -> Link:
    """What such devices have in the hosts that are sold; NVLink joins only whole ones of a kind."""
    keys = {key for key, _ in devices}
    if len(keys) == 1 and keys < MODELS.keys():
        return LINKS[MODELS[keys.pop()].link]
    oldest = min(device.compute_capability or (0, 0) for _, device in devices)
    return LINKS[pcie_of(oldest)]


def pcie_of(capability: tuple[int, int]) -> str:
    """Which PCIe GPUs of such a compute capability have."""
    if capability < (8, 0):
        return "pcie3"
    return "pcie4" if capability < (9, 0) else "pcie5"


def check_size(num_devices: int, where: str) -> None:
    """Refuse what nobody has.

    Raises:
        ConfigError: more than `MAX_DEVICES`.
    """
    if num_devices > MAX_DEVICES:
        raise ConfigError(f"{where}: {num_devices} devices; at most {MAX_DEVICES} can be described")


def _device_and_count(part: str) -> tuple[str, int]:
    found = _PART.fullmatch(part)
    if part in MODELS or found is None:  # the x of rtx4090 does not count anything
        return part, 1
    if int(found[2]) < 1:
        raise ConfigError(f"hardware {part!r}: a count must be at least 1")
    return found[1], int(found[2])
