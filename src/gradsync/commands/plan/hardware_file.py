"""Hardware as text: `--hardware NAME|FILE`, `--network NAME|FILE`, and the file to write.

A file is YAML (or JSON, with the same keys):

    hosts:
    - count: 2                      # such hosts; 1 when left out
      devices:
      - {type: h100, count: 4}      # of the catalogue; every further key overrides it
      - {type: h100, free: 60GB}
      link: nvlink4                 # or {name, latency, bandwidth, source}
      cores: 64
      memory: 512GB
    - devices: a100-40x4            # or another name, see `catalog.py`
    network: infiniband-ndr         # with several hosts; or {name, latency, bandwidth, per_host}

Without `type` a device needs `name`, `memory` and `flops`. `link`, `cores` and `memory` of a host
default to those of a host given only by name. A network's own file has the keys of `network`; its
name is optional. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`, `989TFLOP/s`, `5us`; a bare
number means bytes, seconds or operations. Arithmetic is decimal: a written number is read back bit
for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError

from gradsync.commands.plan.catalog import (
    LINKS,
    NETWORKS,
    device_of,
    hardware_of,
    host_of,
    usual_host,
)
from gradsync.commands.plan.description import Device, Hardware, Host, Kind, Link, runs
from gradsync.core.document import brief, read_document
from gradsync.core.files import check_name, one_line
from gradsync.errors import ConfigError

T = TypeVar("T")

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\D\S*)?", re.ASCII)
_LARGEST = Decimal(10) ** 30
_TENS = {prefix: Decimal(10) ** (3 * n) for n, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
_BYTES = {f"{prefix}B": size for prefix, size in _TENS.items()}
_BYTES |= {f"{prefix}iB": Decimal(1024) ** n for n, prefix in enumerate("KMGTP", start=1)}
_BITS = {f"{prefix}bit": size / 8 for prefix, size in _TENS.items()}
_PARTS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9"}


class Size(int):
    """Bytes."""


class Rate(float):
    """Bytes per second."""


class FlopRate(float):
    """Floating-point operations per second."""


class Time(float):
    """Seconds."""


Quantity = Size | Rate | FlopRate | Time
UNITS: Mapping[type[Quantity], Mapping[str, Decimal]] = {
    Size: _BYTES,
    Rate: {f"{unit}/s": size for unit, size in (_BYTES | _BITS).items()},
    FlopRate: {f"{prefix}FLOP/s": size for prefix, size in _TENS.items()},
    Time: {unit: Decimal(size) for unit, size in _PARTS.items()},
}
"""The unit's size by its name; a number without a unit counts as it is."""
_EXAMPLES = {
    Size: "a size such as 80GB or 80GiB",
    Rate: "a rate such as 10Gbit/s or 1.25TB/s",
    FlopRate: "a rate such as 989TFLOP/s",
    Time: "a time such as 5us",
}


def read_quantity(kind: type[Quantity], value: Any) -> Any:
    """The number, in the base unit of `kind`, of text such as "3.35TB/s"; ValueError says what was
    expected. Rates are above 0, sizes and times at least 0."""
    found = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    units: dict[str | None, Decimal] = {None: Decimal(1), **UNITS[kind]}
    if found is not None and found[2] in units:
        number = Decimal(found[1]) * units[found[2]]
        if 0 < number <= _LARGEST or (number == 0 and kind in (Size, Time)):
            return kind(number)
    raise ValueError(f"Expected {_EXAMPLES[kind]}, got {brief(value)}")


def write_quantity(quantity: Quantity) -> str:
    """The shortest text that is read back as this number."""
    exact = Decimal(int(quantity) if isinstance(quantity, Size) else repr(float(quantity)))
    written = ((exact / size, unit) for unit, size in UNITS[type(quantity)].items())
    return min((f"{number.normalize():f}{unit}" for number, unit in written), key=len)


Count = Annotated[int, Meta(ge=1, le=9999)]
_KEYS = {
    **{"memory_bytes": "memory", "free_bytes": "free", "peak_flops": "flops"},
    **{"memory_bytes_per_s": "bandwidth", "bytes_per_s": "bandwidth", "alpha_s": "latency"},
}
"""By field of a dataclass, its key in a file if that is another."""


class _Section(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename=_KEYS):
    """Keys and values of a file; the fields are those of the dataclass that it describes."""

    def given(self) -> dict[str, Any]:
        """What the file sets."""
        known = msgspec.structs.fields(self)
        values = {field.name: getattr(self, field.name) for field in known}
        return {
            field.name: values[field.name]
            for field in known
            if field.name not in ("type", "count") and values[field.name] != field.default
        }


class _Link(_Section):
    alpha_s: Time
    bytes_per_s: Rate
    name: str = ""
    per_host: bool = False
    source: str = ""


class _Device(_Section):
    count: Count = 1
    type: str | None = None
    kind: Kind | None = None
    name: str | None = None
    memory_bytes: Size | None = None
    free_bytes: Size | None = None
    peak_flops: FlopRate | None = None
    memory_bytes_per_s: Rate | None = None
    compute_capability: tuple[int, int] | None = None
    source: str = ""


class _Host(_Section):
    devices: str | Annotated[list[_Device], Meta(min_length=1)]
    count: Count = 1
    link: str | _Link | None = None
    cores: Annotated[int, Meta(ge=1)] | None = None
    memory_bytes: Size | None = None
    instructions: tuple[str, ...] = ()


class _Hardware(_Section):
    hosts: Annotated[list[_Host], Meta(min_length=1)]
    network: str | _Link | None = None
    notes: tuple[str, ...] = ()


_SUFFIXES = (".yaml", ".yml", ".json")


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware that a file (.yaml, .yml, .json) describes or a name such as h100x4 stands for.
    The one-line ConfigError has the file, the key, what was got and expected."""
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        return hardware_of(name_or_path)
    document = read_document(path, "hardware file")
    return read_hardware(document.values, document.where)


def load_network(name_or_path: str) -> Link:
    """The link with this name, or the one that a YAML file describes; like `load_hardware`."""
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        check_name("network", name_or_path, NETWORKS)
        return NETWORKS[name_or_path]
    document = read_document(path, "network file")
    usual = {"name": path.stem, "source": f"file {path.name}"}
    return _with_figures(_convert(document.values, _Link, document.where), usual)


def read_hardware(document: Any, where: str) -> Hardware:
    """The hardware that a file's content describes; `where` starts the errors."""
    found = _convert(document, _Hardware, where)
    try:
        network = None if found.network is None else _link(found.network, "network", NETWORKS)
        hosts = [host for section in found.hosts for host in [_host(section)] * section.count]
        return Hardware(hosts=tuple(hosts), network=network, notes=found.notes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _convert(document: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(document, kind, dec_hook=read_quantity)
    except ValidationError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from None


def _host(section: _Host) -> Host:
    if isinstance(section.devices, str):
        host = host_of(section.devices)
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
    if isinstance(link, str):
        check_name(what, link, known)
        return known[link]
    return _with_figures(link, {"name": "given"})


def _with_figures(link: _Link, usual: dict[str, Any]) -> Link:
    """A link of a file; `usual` holds what the file may omit."""
    return Link(**usual | link.given())


def dump_hardware(hardware: Hardware) -> str:
    """The YAML that `load_hardware` reads back as an equal value."""
    import yaml

    return yaml.safe_dump(
        hardware_document(hardware), sort_keys=False, width=100, allow_unicode=True
    )


def hardware_document(hardware: Hardware) -> dict[str, Any]:
    """As plain values, with the keys and units of a file."""
    hosts = []
    for host, count in runs(hardware.hosts):
        devices = [_fields(device) | {"count": n} for device, n in runs(host.devices)]
        link = _named(host.link, LINKS)
        hosts.append(_fields(host) | {"count": count, "devices": devices, "link": link})
    whole = _fields(hardware) | {"hosts": hosts, "network": _named(hardware.network, NETWORKS)}
    return msgspec.to_builtins(
        msgspec.convert(whole, _Hardware, dec_hook=read_quantity), enc_hook=write_quantity
    )


def _named(link: Link | None, known: Mapping[str, Link]) -> dict[str, Any] | str | None:
    if link is None:
        return None
    return link.name if known.get(link.name) == link else _fields(link)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by their keys in a file."""
    return {_KEYS.get(name, name): getattr(value, name) for name in value.__slots__}
