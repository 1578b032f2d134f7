"""Hardware as text: `--hardware NAME|FILE`, and the file to write.

A file is YAML (or JSON, with the same keys):

    hosts:
    - count: 2                      # such hosts; 1 when left out
      devices:
      - {type: h100, count: 4}      # of `description.DEVICES`; every further key overrides it
      - {type: h100, free: 60GB}
      link: nvlink4                 # or {name, latency, bandwidth, source}
      cores: 64
      memory: 512GB
    - devices: a100-40x4            # or a named host
    network: infiniband-ndr         # with several hosts; or {name, latency, bandwidth, per_host}

Without `type` a device needs `name`, `memory` and `flops`. `link`, `cores` and `memory` of a host
default to those of a host given only by name. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`,
`989TFLOP/s`, `5us`; a bare number means bytes, seconds or operations, and is what is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, ValidationError

from gradsync.commands.document import brief, read_document
from gradsync.commands.plan.description import (
    LINKS,
    NETWORKS,
    Device,
    Hardware,
    Host,
    Kind,
    Link,
    device_of,
    named_hardware,
    runs,
    usual_host,
)
from gradsync.core.files import check_name, one_line
from gradsync.errors import ConfigError


class Quantity(float):
    """Bytes, bytes per second, seconds, or operations per second."""


_TENS = {prefix: 10.0 ** (3 * power) for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
_UNITS = {f"{prefix}B": size for prefix, size in _TENS.items()}
_UNITS |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS |= {f"{unit}/s": size for unit, size in _UNITS.items()}
_UNITS |= {f"{prefix}bit/s": size / 8 for prefix, size in _TENS.items()}
_UNITS |= {f"{prefix}FLOP/s": size for prefix, size in _TENS.items()}
_UNITS |= {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\D\S*|)", re.ASCII | re.IGNORECASE)


def read_quantity(_: type, value: Any) -> Quantity:
    """The number of text such as "3.35TB/s"; ValueError says what was expected."""
    found = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    if found is not None and found[2] in _UNITS:
        number = float(found[1]) * _UNITS[found[2]]
        if number < 1e30:
            return Quantity(number)
    raise ValueError(
        f"Expected a number such as 80GB, 80GiB, 10Gbit/s, 989TFLOP/s or 5us, got {brief(value)}"
    )


_KEYS = {
    **{"memory_bytes": "memory", "free_bytes": "free", "peak_flops": "flops"},
    **{"memory_bytes_per_s": "bandwidth", "bytes_per_s": "bandwidth", "alpha_s": "latency"},
}
"""By field of a dataclass, its key in a file if that is another."""
_Count = Annotated[int, Meta(ge=1, le=9999)]


class _Section(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename=_KEYS):
    """Keys and values of a file; the fields are those of the dataclass that it describes."""

    def given(self) -> dict[str, Any]:
        """What the file sets."""
        values = {f.name: (getattr(self, f.name), f.default) for f in msgspec.structs.fields(self)}
        return {
            name: _plain(value) if isinstance(value, Quantity) else value
            for name, (value, default) in values.items()
            if name not in ("type", "count") and value != default
        }


def _plain(quantity: Quantity) -> int | float:
    return int(quantity) if quantity.is_integer() else float(quantity)


class _Link(_Section):
    alpha_s: Quantity
    bytes_per_s: Quantity
    name: str = ""
    per_host: bool = False
    source: str = ""


class _Device(_Section):
    count: _Count = 1
    type: str | None = None
    kind: Kind | None = None
    name: str | None = None
    memory_bytes: Quantity | None = None
    free_bytes: Quantity | None = None
    peak_flops: Quantity | None = None
    memory_bytes_per_s: Quantity | None = None
    compute_capability: tuple[int, int] | None = None
    source: str = ""


class _Host(_Section):
    devices: str | Annotated[list[_Device], Meta(min_length=1)]
    count: _Count = 1
    link: str | _Link | None = None
    cores: Annotated[int, Meta(ge=1)] | None = None
    memory_bytes: Quantity | None = None
    instructions: tuple[str, ...] = ()


class _Hardware(_Section):
    hosts: Annotated[list[_Host], Meta(min_length=1)]
    network: str | _Link | None = None
    notes: tuple[str, ...] = ()


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware that a file (.yaml, .yml, .json) describes or a name such as h100x4 stands for.
    The one-line ConfigError has the file, the key, what was got and expected."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return named_hardware(name_or_path)
    document = read_document(path, "hardware file")
    try:
        found = msgspec.convert(document.values, _Hardware, dec_hook=read_quantity)
        network = None if found.network is None else _link(found.network, "network", NETWORKS)
        hosts = [host for section in found.hosts for host in [_host(section)] * section.count]
        return Hardware(hosts=tuple(hosts), network=network, notes=found.notes)
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"{document.where}: {one_line(error)}") from None


def _host(section: _Host) -> Host:
    if isinstance(section.devices, str):
        host = named_hardware(section.devices).hosts[0]
    else:  # listed; the rest as for a host given only by name
        listed = [device for part in section.devices for device in [_device(part)] * part.count]
        host = usual_host(listed)
    given = section.given()
    del given["devices"]
    if section.link is not None:
        given["link"] = _link(section.link, "link", LINKS)
    return replace(host, **given)


def _device(section: _Device) -> Device:
    given = section.given()
    if section.type is not None:
        if given.keys() & {"peak_flops", "memory_bytes_per_s"}:
            given.setdefault("source", "given")
        return replace(device_of(section.type), **given)
    missing = [_KEYS.get(f, f) for f in ("name", "memory_bytes", "peak_flops") if f not in given]
    if missing:
        raise ConfigError(f"a device without type needs {', '.join(missing)}")
    given.setdefault("kind", "cuda")
    return Device(**given)


def _link(link: str | _Link, what: str, known: Mapping[str, Link]) -> Link:
    """A link by its name or by its figures."""
    if isinstance(link, _Link):
        given: dict[str, Any] = {"name": "given"} | link.given()
        return Link(**given)
    check_name(what, link, known)
    return known[link]


def dump_hardware(hardware: Hardware) -> str:
    """The YAML that `load_hardware` reads back as an equal value."""
    import yaml

    document = hardware_document(hardware)
    return yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)


def hardware_document(hardware: Hardware) -> dict[str, Any]:
    """As plain values, with the keys of a file."""
    hosts = []
    for host, count in runs(hardware.hosts):
        devices = [_fields(device) | {"count": n} for device, n in runs(host.devices)]
        link = _named(host.link, LINKS)
        hosts.append(_fields(host) | {"count": count, "devices": devices, "link": link})
    network = hardware.network and _named(hardware.network, NETWORKS)
    whole = _fields(hardware) | {"hosts": hosts, "network": network}
    # Through the file's own sections, which omit defaults.
    section = msgspec.convert(whole, _Hardware, dec_hook=read_quantity)
    return msgspec.to_builtins(section, enc_hook=_plain)


def _named(link: Link, known: Mapping[str, Link]) -> dict[str, Any] | str:
    return link.name if known.get(link.name) == link else _fields(link)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by their keys in a file."""
    return {_KEYS.get(name, name): getattr(value, name) for name in value.__slots__}
