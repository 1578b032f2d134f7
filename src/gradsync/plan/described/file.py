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
    - devices: a100-40x4            # or another name, see `catalog.py`
    network: infiniband-ndr         # with several hosts; or {name, latency, bandwidth, per_host}

Without `type` a device needs `name`, `memory` and `flops`. Left out, `link`, `cores` and `memory`
of a host are those of one that is only named. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`,
`989TFLOP/s`, `5us`; a bare number counts bytes, seconds or operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from gradsync.core.document import read_document
from gradsync.errors import ConfigError
from gradsync.plan.described.catalog import (
    check_size,
    device_of,
    hardware_of,
    host_of,
    usual_host,
)
from gradsync.plan.described.links import LINK_KEYS, LINKS, NETWORKS, link_of, read_link
from gradsync.plan.described.section import (
    FLOPS,
    RATES,
    Section,
    write_bytes,
    write_flops,
    write_rate,
    write_time,
)
from gradsync.plan.description import Device, Hardware, Host, Kind, Link

T = TypeVar("T")

_SUFFIXES = (".yaml", ".yml", ".json")
_HARDWARE = ("hosts", "network", "notes")
_HOST = ("count", "devices", "link", "cores", "memory", "instructions", "interfaces")
_DEVICE = (
    *("count", "type", "name", "kind", "memory", "free", "flops", "bandwidth"),
    *("compute_capability", "mig", "shared", "source"),
)

_KINDS = ("cuda", "cpu")
_RATE = "a rate such as 3.35TB/s or 400Gbit/s"
_FLOPS = "a rate such as 989TFLOP/s"


def read_hardware(document: Any, where: str) -> Hardware:
    """The hardware that a file's content describes.

    Args:
        document: plain values, as YAML and JSON give them.
        where: begins the errors, such as "hardware file a.yaml".

    Raises:
        ConfigError: an unknown or missing key, or a value that cannot be; one line.
    """
    top = Section.of(document, where, _HARDWARE)
    hosts: list[Host] = []
    num_devices = 0
    for section in top.sections("hosts", _HOST):
        host, count = _host(section), section.count("count")
        num_devices += count * len(host.devices)
        check_size(num_devices, section.where)
        hosts += [host] * count
    if len(hosts) > 1 and not top.has("network"):
        raise ConfigError(
            f"{where}: network is missing; {len(hosts)} hosts need one, such as "
            "ethernet-10g or {name: ours, latency: 30us, bandwidth: 10Gbit/s}"
        )
    network = _link(top, "network", NETWORKS) if top.has("network") else None
    return Hardware(hosts=tuple(hosts), network=network, notes=top.texts("notes"))


def _host(section: Section) -> Host:
    if isinstance(section.values.get("devices"), str):
        host = _named(section, "devices", host_of)
    else:
        host = _listed(section)
    return replace(
        host,
        link=_link(section, "link", LINKS) if section.has("link") else host.link,
        cores=section.count("cores", host.cores),
        memory_bytes=section.size("memory", host.memory_bytes),
        instructions=section.texts("instructions"),
        interfaces=section.texts("interfaces"),
    )


def _link(section: Section, key: str, known: Mapping[str, Link]) -> Link:
    """A link by its name or by its figures."""
    if isinstance(section.values[key], str):
        return _named(section, key, lambda name: link_of(name, known, key))
    return read_link(section.section(key, LINK_KEYS))


def _listed(section: Section) -> Host:
    """A host whose devices are listed; the rest as of a host that is only named."""
    devices: list[tuple[str, Device]] = []
    for part in section.sections("devices", _DEVICE):
        count = part.count("count")
        check_size(len(devices) + count, part.where)
        devices += [(part.text("type", ""), _device(part))] * count
    return usual_host(devices)


def _device(section: Section) -> Device:
    if section.has("type"):
        start = _named(section, "type", device_of)
        if section.has("flops") or section.has("bandwidth"):
            start = replace(start, source="given")
    else:
        start = Device(
            kind="cuda",
            name=section.text("name"),
            memory_bytes=section.size("memory"),
            peak_flops=section.quantity("flops", FLOPS, _FLOPS),
        )
    memory = section.size("memory", start.memory_bytes)
    free = section.size("free", zero=True) if section.has("free") else None
    if free is not None and free > memory:
        raise section.refuse("free", f"at most the device's memory, {memory} bytes")
    kind = section.text("kind", start.kind)
    if kind not in _KINDS:
        raise section.refuse("kind", " or ".join(_KINDS))
    rate = start.memory_bytes_per_s
    if section.has("bandwidth"):
        rate = section.quantity("bandwidth", RATES, _RATE)
    return Device(
        kind=cast(Kind, kind),
        name=section.text("name", start.name),
        memory_bytes=memory,
        free_bytes=free,
        peak_flops=section.quantity("flops", FLOPS, _FLOPS, start.peak_flops),
        compute_capability=_capability(section, start.compute_capability),
        memory_bytes_per_s=rate,
        mig=section.flag("mig", start.mig),
        shared=section.flag("shared", start.shared),
        source=section.text("source", start.source),
    )


def _capability(section: Section, default: tuple[int, int] | None) -> tuple[int, int] | None:
    """Written as [9, 0]; 9.0 and "9.0" are understood."""
    if not section.has("compute_capability"):
        return default
    value = section.values["compute_capability"]
    parts = value if isinstance(value, list) else str(value).split(".")
    try:
        major, minor = (int(str(part)) for part in parts)
    except ValueError:
        raise section.refuse("compute_capability", "two numbers such as [9, 0]") from None
    return major, minor


def _named(section: Section, key: str, find: Callable[[str], T]) -> T:
    """The text under `key` through `find`, whose error gets the place."""
    try:
        return find(section.text(key))
    except ConfigError as error:
        if str(error).startswith(section.where):
            raise
        raise ConfigError(f"{section.at(key)}: {error}") from None


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware that a file describes or a name stands for.

    Args:
        name_or_path: a path that ends in .yaml, .yml or .json, or a name such as h100x4 (see
            `catalog.py`).

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
        "hosts": [_counted(count, _host_document(host)) for count, host in _runs(hardware.hosts)]
    }
    if hardware.network is not None:
        document["network"] = _link_document(hardware.network, NETWORKS)
    if hardware.notes:
        document["notes"] = list(hardware.notes)
    return document


def _host_document(host: Host) -> dict[str, Any]:
    document: dict[str, Any] = {
        "devices": [
            _counted(count, _device_document(device)) for count, device in _runs(host.devices)
        ],
        "link": _link_document(host.link, LINKS),
        "cores": host.cores,
        "memory": write_bytes(host.memory_bytes),
    }
    if host.instructions:
        document["instructions"] = list(host.instructions)
    if host.interfaces:
        document["interfaces"] = list(host.interfaces)
    return document


def _device_document(device: Device) -> dict[str, Any]:
    free, rate = device.free_bytes, device.memory_bytes_per_s
    capability = device.compute_capability
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


def _link_document(link: Link, known: Mapping[str, Link]) -> dict[str, Any] | str:
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


def hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    """Titles and lines; equal devices and equal hosts in one."""
    rows: list[tuple[str, str]] = []
    for host, same_hosts in groupby(hardware.hosts):
        count = len(list(same_hosts))
        if count > 1:
            rows.append(("hosts", f"{count} of these"))
        for device, same in groupby(host.devices):
            rows.append(("devices", f"{len(list(same))} x {_device_text(device)}"))
        rows.append(("link", _link_text(host.link)))
        rows.append(("host memory", f"{host.memory_bytes / 1e9:.1f} GB"))
        if host.instructions:
            rows.append(("instructions", " ".join(host.instructions)))
        if host.interfaces:
            rows.append(("interfaces", " ".join(host.interfaces)))
    if hardware.network is not None:
        rows.append(("network", _link_text(hardware.network)))
    return rows + [("note", note) for note in hardware.notes]


def _device_text(device: Device) -> str:
    words = [f"{device.memory_bytes / 1e9:.1f} GB"]
    if device.free_bytes is not None:
        words.append(f"{device.free_bytes / 1e9:.1f} GB free")
    words.append(f"{device.peak_flops / 1e12:.3g} TFLOP/s")
    if device.compute_capability is not None:
        words.append("compute capability {}.{}".format(*device.compute_capability))
    if device.shared:
        words.append("in use by others")
    return f"{device.name}: {', '.join(words)}{_source_text(device.source)}"


def _link_text(link: Link) -> str:
    figures = f"{link.bytes_per_s / 1e9:.3g} GB/s, {link.alpha_s * 1e6:.3g} µs"
    return f"{link.name}: {figures}{_source_text(link.source)}"


def _source_text(source: str) -> str:
    return f"; {source}" if source else ""
