"""Hardware as text: `--hardware NAME|FILE`, and the file that describes a machine for elsewhere.

A file is YAML (or JSON, with the same keys):

    hosts:
    - count: 2                      # such hosts; 1 when left out
      devices:
      - {type: h100, count: 4}      # of the catalogue; every further key overrides it
      - {type: h100, free: 60GB, shared: true}
      link: nvlink4                 # or {name, latency, bandwidth, source}
      cores: 64
      memory: 512GB
    - devices: a100-40x4            # or as `hardware_name` has it
    network: infiniband-ndr         # with several hosts; or {name, latency, bandwidth, per_host}

Without `type` a device needs `name`, `memory` and `flops`. Left out, `link`, `cores` and `memory`
of a host are those of one that is only named. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`,
`989TFLOP/s`, `5us`; a bare number counts bytes, seconds or operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from gradsync.errors import ConfigError
from gradsync.hardware.described.fields import read_hardware
from gradsync.hardware.described.links import LINKS
from gradsync.hardware.described.name import hardware_of
from gradsync.hardware.described.networks import NETWORKS
from gradsync.hardware.described.units import write_bytes, write_flops, write_rate, write_time
from gradsync.hardware.description import Device, Hardware, Host, Link
from gradsync.runtime.document import read_document

T = TypeVar("T")

_SUFFIXES = (".yaml", ".yml", ".json")


def load_hardware(name_or_path: str) -> Hardware:
    """What a file describes, or a name stands for.

    Args:
        name_or_path: a path that ends in .yaml, .yml or .json, or a name such as h100x4 (see
            `hardware_name`).

    Raises:
        ConfigError: no such file or device; what the file says cannot be. One line with the file,
            the key, what was got and expected.
    """
    path = Path(name_or_path)
    if path.suffix in _SUFFIXES:
        document = read_document(path, "hardware file")
        return read_hardware(document.values, document.where)
    if path.is_file():
        raise ConfigError(f"hardware file {path}: its name must end in {', '.join(_SUFFIXES)}")
    try:
        return hardware_of(name_or_path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a file that describes a machine ends in {', '.join(_SUFFIXES)}"
        ) from None


def dump_hardware(hardware: Hardware) -> str:
    """The YAML that `load_hardware` reads back as an equal value."""
    import yaml

    return yaml.safe_dump(
        hardware_document(hardware), sort_keys=False, width=100, allow_unicode=True
    )


def hardware_document(hardware: Hardware) -> dict[str, Any]:
    """As plain values, with the keys and units of a file."""
    document: dict[str, Any] = {
        "hosts": [_counted(count, _host(host)) for count, host in _runs(hardware.hosts)]
    }
    if hardware.network is not None:
        document["network"] = _link(hardware.network, NETWORKS)
    if hardware.notes:
        document["notes"] = list(hardware.notes)
    return document


def _host(host: Host) -> dict[str, Any]:
    document: dict[str, Any] = {
        "devices": [_counted(count, _device(device)) for count, device in _runs(host.devices)],
        "link": _link(host.link, LINKS),
        "cores": host.cores,
        "memory": write_bytes(host.memory_bytes),
    }
    if host.instructions:
        document["instructions"] = list(host.instructions)
    if host.interfaces:
        document["interfaces"] = list(host.interfaces)
    return document


def _device(device: Device) -> dict[str, Any]:
    free, rate, capability = (
        device.free_bytes,
        device.memory_bytes_per_s,
        device.compute_capability,
    )
    values = {
        "name": device.name,
        "kind": device.kind,
        "memory": write_bytes(device.memory_bytes),
        "free": None if free is None else write_bytes(free),
        "flops": write_flops(device.peak_flops),
        "bandwidth": None if rate is None else write_rate(rate),
        "compute_capability": None if capability is None else list(capability),
        "mig": device.mig or None,
        "shared": device.shared or None,
        "source": device.source or None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _link(link: Link, known: Mapping[str, Link]) -> dict[str, Any] | str:
    if known.get(link.name) == link:
        return link.name
    document: dict[str, Any] = {
        "name": link.name,
        "latency": write_time(link.alpha_s),
        "bandwidth": write_rate(link.bytes_per_s),
    }
    if link.per_host:
        document["per_host"] = True
    return document | {"source": link.source} if link.source else document


def _counted(count: int, document: dict[str, Any]) -> dict[str, Any]:
    return {"count": count, **document} if count > 1 else document


def _runs(values: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Equal neighbours as one, with their number."""
    for value, same in groupby(values):
        yield len(list(same)), value
