"""The keys of a hardware file, checked one by one; pure. See `hardware_file` for what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from gradsync.errors import ConfigError
from gradsync.hardware.described.catalog import device_of
from gradsync.hardware.described.links import link_of
from gradsync.hardware.described.name import (
    check_size,
    host_of,
    usual_host,
)
from gradsync.hardware.described.networks import NETWORKS
from gradsync.hardware.described.section import Section
from gradsync.hardware.described.units import FLOPS, RATES, TIMES
from gradsync.hardware.description import Device, Hardware, Host, Kind, Link

T = TypeVar("T")

_HARDWARE = ("hosts", "network", "notes")
_HOST = ("count", "devices", "link", "cores", "memory", "instructions", "interfaces")
_DEVICE = (
    *("count", "type", "name", "kind", "memory", "free", "flops", "bandwidth"),
    *("compute_capability", "mig", "shared", "source"),
)
_LINK = ("name", "latency", "bandwidth", "per_host", "source")

_KINDS: tuple[Kind, ...] = ("cuda", "cpu")
_RATE = "a rate such as 3.35TB/s or 400Gbit/s"
_FLOPS = "a rate such as 989TFLOP/s"
_LATENCY = "a time such as 5us"


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
    network = _link(top, "network", _preset) if top.has("network") else None
    return Hardware(hosts=tuple(hosts), network=network, notes=top.texts("notes"))


def _host(section: Section) -> Host:
    if isinstance(section.values.get("devices"), str):
        host = _named(section, "devices", host_of)
    else:
        host = _listed(section)
    return replace(
        host,
        link=_link(section, "link", link_of) if section.has("link") else host.link,
        cores=section.count("cores", host.cores),
        memory_bytes=section.size("memory", host.memory_bytes),
        instructions=section.texts("instructions"),
        interfaces=section.texts("interfaces"),
    )


def _link(section: Section, key: str, find: Callable[[str], Link]) -> Link:
    """A link by its name, which `find` knows, or by its figures."""
    if isinstance(section.values[key], str):
        return _named(section, key, find)
    part = section.section(key, _LINK)
    return Link(
        name=part.text("name"),
        alpha_s=part.quantity("latency", TIMES, _LATENCY, zero=True),
        bytes_per_s=part.quantity("bandwidth", RATES, _RATE),
        source=part.text("source", ""),
        per_host=part.flag("per_host", False),
    )


def _preset(name: str) -> Link:
    if name not in NETWORKS:
        raise ConfigError(f"unknown network {name!r} (there are: {', '.join(NETWORKS)})")
    return NETWORKS[name]


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
    rate = start.memory_bytes_per_s
    if section.has("bandwidth"):
        rate = section.quantity("bandwidth", RATES, _RATE)
    return Device(
        kind=_kind(section, start.kind),
        name=section.text("name", start.name),
        memory_bytes=memory,
        free_bytes=_free(section, memory),
        peak_flops=section.quantity("flops", FLOPS, _FLOPS, start.peak_flops),
        compute_capability=_capability(section, start.compute_capability),
        memory_bytes_per_s=rate,
        mig=section.flag("mig", start.mig),
        shared=section.flag("shared", start.shared),
        source=section.text("source", start.source),
    )


def _free(section: Section, memory: int) -> int | None:
    if not section.has("free"):
        return None
    free = section.size("free", zero=True)
    if free > memory:
        raise section.refuse("free", f"at most the device's memory, {memory} bytes")
    return free


def _kind(section: Section, default: Kind) -> Kind:
    name = section.text("kind", default)
    for kind in _KINDS:
        if name == kind:
            return kind
    raise section.refuse("kind", " or ".join(_KINDS))


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
    """What `find` makes of the text under `key`; its error, with the place."""
    try:
        return find(section.text(key))
    except ConfigError as error:
        if str(error).startswith(section.where):
            raise
        raise ConfigError(f"{section.at(key)}: {error}") from None
