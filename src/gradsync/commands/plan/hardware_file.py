"""Hardware as text: `--hardware NAME|FILE`, `--network NAME|FILE`, and the file to write.

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

Without `type` a device needs `name`, `memory` and `flops`. `link`, `cores` and `memory` of a host
default to those of a host given only by name. A network's own file has the keys of `network`; its
name is optional. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`, `989TFLOP/s`, `5us`; a bare
number means bytes, seconds or operations. Arithmetic is decimal: a written number is read back bit
for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from gradsync.commands.plan.catalog import (
    LINKS,
    NETWORKS,
    check_size,
    device_of,
    hardware_of,
    host_of,
    usual_host,
)
from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.core.document import brief, read_document
from gradsync.core.files import perhaps
from gradsync.errors import ConfigError

T = TypeVar("T")

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\D\S*)?", re.ASCII)
_LARGEST = Decimal(10) ** 30
_LONGEST_TEXT = 500

_TENS = {prefix: Decimal(10) ** (3 * n) for n, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
_BYTES = {f"{prefix}B": size for prefix, size in _TENS.items()}
_BINARY = {f"{prefix}iB": Decimal(1024) ** n for n, prefix in enumerate("KMGTP", start=1)}
_BITS = {f"{prefix}bit": size / 8 for prefix, size in _TENS.items()}
_FLOP = {f"{prefix}FLOP/s": size for prefix, size in _TENS.items()}
_PARTS = ("n", "u", "m", "")
_SECONDS = {f"{prefix}s": Decimal(10) ** (3 * n - 9) for n, prefix in enumerate(_PARTS)}

SIZES: Mapping[str, Decimal] = {"": Decimal(1), **_BYTES, **_BINARY}
"""Bytes by unit. A bare number is bytes."""
RATES: Mapping[str, Decimal] = {
    "": Decimal(1),
    **{f"{unit}/s": size for unit, size in (_BYTES | _BINARY | _BITS).items()},
}
"""Bytes per second by unit; networks are rated in bits."""
FLOPS: Mapping[str, Decimal] = {
    **{"": Decimal(1), **_FLOP},
    **{f"{prefix}FLOPS": size for prefix, size in _TENS.items()},
}
"""Floating-point operations per second by unit."""
TIMES: Mapping[str, Decimal] = {"": Decimal(1), "µs": Decimal("1e-6"), **_SECONDS}
"""Seconds by unit."""


def read_quantity(value: Any, units: Mapping[str, Decimal]) -> Decimal | None:
    """The number, in the base unit of `units`, of text such as "3.35TB/s"; None if invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = _NUMBER.fullmatch(str(value).strip())
    if found is None or (found[2] or "") not in units:
        return None
    return Decimal(found[1]) * units[found[2] or ""]


def write_bytes(size: int) -> str:
    """`size` in a suitable unit: "80GiB", "141GB", "85.899345919GB"."""
    if size % 2**30 == 0 and size % 10**9:
        return f"{size // 2**30}GiB"
    return _write(size, _BYTES)


def _write(number: float, units: Mapping[str, Decimal]) -> str:
    """`number` in the largest of the ascending `units` that leaves at least 1."""
    exact = Decimal(repr(number))
    fitting = [unit for unit, size in units.items() if abs(exact) >= size] or [next(iter(units))]
    unit = fitting[-1]
    scaled = exact / units[unit]
    text = f"{scaled:f}"
    # Far beyond the units' range a row of zeros is useless.
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text if len(text) <= 24 else scaled}{unit}"


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is written in a file."""

    expected: str
    read: Callable[[Any], Any]  # The value; None if invalid
    write: Callable[[Any], Any] = lambda value: value


def _number(value: Any, units: Mapping[str, Decimal], *, zero: bool = False) -> float | None:
    number = read_quantity(value, units)
    if number is None or not (0 < number <= _LARGEST or (zero and number == 0)):
        return None
    return float(number)


def _size(value: Any, least: int = 1) -> int | None:
    """Whole bytes; a fraction is dropped."""
    number = read_quantity(value, SIZES)
    return None if number is None or not least <= number <= _LARGEST else int(number)


def _capability(value: Any) -> tuple[int, int] | None:
    parts = value if isinstance(value, list) else str(value).split(".")
    try:
        major, minor = (int(str(part)) for part in parts)
    except ValueError:
        return None
    return major, minor


def _texts(value: Any) -> tuple[str, ...] | None:
    words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return tuple(value) if words else None


COUNT = Form("a whole number, at least 1", lambda v: v if type(v) is int and v > 0 else None)
FLAG = Form("true or false", lambda v: v if type(v) is bool else None)
TEXT = Form(
    f"text, at most {_LONGEST_TEXT} characters",
    lambda v: v if isinstance(v, str) and len(v) <= _LONGEST_TEXT else None,
)
TEXTS = Form("a list of words", _texts, list)
KIND = Form("cuda or cpu", lambda v: v if v in ("cuda", "cpu") else None)
SIZE = Form("a size such as 80GB or 80GiB", _size, write_bytes)
FREE = replace(SIZE, read=partial(_size, least=0))
FLOP_RATE = Form(
    "a rate such as 989TFLOP/s", partial(_number, units=FLOPS), partial(_write, units=_FLOP)
)
RATE = Form(
    "a rate such as 10Gbit/s or 1.25TB/s",
    partial(_number, units=RATES),
    partial(_write, units={f"{unit}/s": size for unit, size in _BYTES.items()}),
)
TIME = Form(
    "a time such as 5us", partial(_number, units=TIMES, zero=True), partial(_write, units=_SECONDS)
)
CAPABILITY = Form("two numbers such as [9, 0]", _capability, list)  # 9.0 is accepted too

Fields = Mapping[str, tuple[str, Form]]
"""By key of the file: field of the dataclass, and its form."""
_DEVICE: Fields = {
    "name": ("name", TEXT),
    "kind": ("kind", KIND),
    "memory": ("memory_bytes", SIZE),
    "free": ("free_bytes", FREE),
    "flops": ("peak_flops", FLOP_RATE),
    "bandwidth": ("memory_bytes_per_s", RATE),
    "compute_capability": ("compute_capability", CAPABILITY),
    "shared": ("shared", FLAG),
    "source": ("source", TEXT),
}
_LINK: Fields = {
    "name": ("name", TEXT),
    "latency": ("alpha_s", TIME),
    "bandwidth": ("bytes_per_s", RATE),
    "per_host": ("per_host", FLAG),
    "source": ("source", TEXT),
}
_HOST: Fields = {
    "cores": ("cores", COUNT),
    "memory": ("memory_bytes", SIZE),
    "instructions": ("instructions", TEXTS),
    "interfaces": ("interfaces", TEXTS),
}
_HARDWARE: Fields = {"notes": ("notes", TEXTS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Keys and values of a file that people write, and the path to them. An empty value (YAML's
    null) counts as absent; errors state the place, what was got and expected, in one line."""

    where: str  # Such as `hardware file a.yaml: hosts[0].link`
    values: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any, where: str, known: Collection[str]) -> Section:
        """`value` as a section with only `known` keys."""
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where}: got {brief(value)}, expected keys and values ({', '.join(known)})"
            )
        for key in value:
            if key not in known:
                hint = perhaps(str(key), known)
                raise ConfigError(
                    f"{where}: unknown key {brief(key)}{hint} (there are: {', '.join(known)})"
                )
        return cls(where=where, values=value)

    def has(self, key: str) -> bool:
        """Whether the key is present, with a value."""
        return self.values.get(key) is not None

    def at(self, key: str) -> str:
        """The path to the value of `key`."""
        return f"{self.where}.{key}" if ": " in self.where else f"{self.where}: {key}"

    def refuse(self, key: str, expected: str) -> ConfigError:
        """The error about the value of `key`."""
        if not self.has(key):
            return ConfigError(f"{self.at(key)} is missing; expected {expected}")
        return ConfigError(f"{self.at(key)}: got {brief(self.values[key])}, expected {expected}")

    def sections(self, key: str, known: Collection[str]) -> list[Section]:
        """The list of sections under `key`; at least one."""
        values = self.values.get(key)
        if not isinstance(values, list) or not values:
            raise self.refuse(key, f"a list with at least one entry ({', '.join(known)})")
        return [Section.of(value, f"{self.at(key)}[{i}]", known) for i, value in enumerate(values)]

    def value(self, key: str, form: Form) -> Any:
        """The value of `key`, which is required."""
        found = form.read(self.values.get(key)) if self.has(key) else None
        if found is None:
            raise self.refuse(key, form.expected)
        return found

    def count(self) -> int:
        """How many equal items the section stands for."""
        return self.value("count", COUNT) if self.has("count") else 1

    def given(self, known: Fields) -> dict[str, Any]:
        """The dataclass fields that the file sets."""
        return {name: self.value(key, form) for key, (name, form) in known.items() if self.has(key)}

    def named(self, key: str, find: Callable[[str], T]) -> T:
        """The text under `key`, passed to `find`; its error gets the place."""
        text = self.value(key, TEXT)
        try:
            return find(text)
        except ConfigError as error:
            raise ConfigError(f"{self.at(key)}: {error}") from None


_SUFFIXES = (".yaml", ".yml", ".json")


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware that a file (.yaml, .yml, .json) describes or a name such as h100x4 stands for.
    The one-line ConfigError has the file, the key, what was got and expected."""
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


def load_network(name_or_path: str) -> Link:
    """The link with this name, or the one that a YAML file describes; like `load_hardware`."""
    if name_or_path in NETWORKS:
        return NETWORKS[name_or_path]
    path, suffixes = Path(name_or_path), _SUFFIXES[:2]
    if path.suffix in suffixes or path.is_file():
        document = read_document(path, "network file")
        usual = {"name": path.stem, "source": f"file {path.name}"}
        return _read_link(Section.of(document.values, document.where, _LINK), usual)
    hint = perhaps(name_or_path, NETWORKS)
    raise ConfigError(
        f"unknown network {name_or_path!r}{hint} (there are: {', '.join(NETWORKS)}; or a file that "
        f"ends in {' or '.join(suffixes)})"
    )


def read_hardware(document: Any, where: str) -> Hardware:
    """The hardware that a file's content describes; `where` starts the errors."""
    top = Section.of(document, where, ("hosts", "network", "notes"))
    hosts: list[Host] = []
    num_devices = 0
    for section in top.sections("hosts", ("count", "devices", "link", *_HOST)):
        host, count = _read_host(section), section.count()
        num_devices += count * len(host.devices)
        check_size(num_devices, section.where)
        hosts += [host] * count
    if len(hosts) > 1 and not top.has("network"):
        raise ConfigError(
            f"{where}: network is missing; {len(hosts)} hosts need one, such as "
            "ethernet-10g or {name: ours, latency: 30us, bandwidth: 10Gbit/s}"
        )
    network = _named_link(top, "network", NETWORKS) if top.has("network") else None
    return Hardware(hosts=tuple(hosts), network=network, **top.given(_HARDWARE))


def _read_host(section: Section) -> Host:
    if isinstance(section.values.get("devices"), str):
        host = section.named("devices", host_of)
    else:  # listed; the rest as for a host given only by name
        devices: list[tuple[str, Device]] = []
        for part in section.sections("devices", ("count", "type", *_DEVICE)):
            count = part.count()
            check_size(len(devices) + count, part.where)
            key = part.value("type", TEXT) if part.has("type") else ""
            devices += [(key, _read_device(part))] * count
        host = usual_host(devices)
    link = _named_link(section, "link", LINKS) if section.has("link") else host.link
    return replace(host, link=link, **section.given(_HOST))


def _read_device(section: Section) -> Device:
    if section.has("type"):
        device = section.named("type", device_of)
        if section.has("flops") or section.has("bandwidth"):
            device = replace(device, source="given")
        device = replace(device, **section.given(_DEVICE))
    else:
        needed = {key: _DEVICE[key] for key in ("name", "memory", "flops")}
        start: dict[str, Any] = {"kind": "cuda"}
        start |= {name: section.value(key, form) for key, (name, form) in needed.items()}
        device = Device(**start | section.given(_DEVICE))
    if device.free_bytes is not None and device.free_bytes > device.memory_bytes:
        memory = device.memory_bytes
        raise section.refuse("free", f"at most the device's memory, {memory} bytes")
    return device


def _named_link(section: Section, key: str, known: Mapping[str, Link]) -> Link:
    """A link by its name or by its figures."""
    name = section.values[key]
    if not isinstance(name, str):
        return _read_link(Section.of(name, section.at(key), _LINK), {})
    if name not in known:
        there = f"unknown {key} {brief(name)} (there are: {', '.join(known)})"
        raise ConfigError(f"{section.at(key)}: {there}")
    return known[name]


def _read_link(section: Section, usual: dict[str, Any]) -> Link:
    """A link by its figures; `usual` holds what a file may omit."""
    for key in ("name", "latency", "bandwidth"):
        if key not in usual:
            section.value(key, _LINK[key][1])
    return Link(**usual | section.given(_LINK))


def dump_hardware(hardware: Hardware) -> str:
    """The YAML that `load_hardware` reads back as an equal value."""
    import yaml

    return yaml.safe_dump(
        hardware_document(hardware), sort_keys=False, width=100, allow_unicode=True
    )


def hardware_document(hardware: Hardware) -> dict[str, Any]:
    """As plain values, with the keys and units of a file."""
    network = hardware.network
    return {
        "hosts": [_counted(count, _host_document(host)) for count, host in _runs(hardware.hosts)],
        **({} if network is None else {"network": _link_document(network, NETWORKS)}),
        **_plain(hardware, _HARDWARE),
    }


def _host_document(host: Host) -> dict[str, Any]:
    devices = [_counted(count, _plain(device, _DEVICE)) for count, device in _runs(host.devices)]
    return {"devices": devices, "link": _link_document(host.link, LINKS), **_plain(host, _HOST)}


def _link_document(link: Link, known: Mapping[str, Link]) -> dict[str, Any] | str:
    return link.name if known.get(link.name) == link else _plain(link, _LINK)


def _plain(value: Any, known: Fields) -> dict[str, Any]:
    """The keys and values of a dataclass, without fields that have their defaults."""
    usual = {field.name: field.default for field in fields(value)}
    return {
        key: form.write(found)
        for key, (name, form) in known.items()
        if (found := getattr(value, name)) != usual[name]
    }


def _counted(count: int, document: dict[str, Any]) -> dict[str, Any]:
    return {"count": count, **document} if count > 1 else document


def _runs(values: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Runs of equal neighbours as one value, with their count."""
    for value, same in groupby(values):
        yield len(list(same)), value


def hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    """Titles and lines for people; equal devices and equal hosts are merged."""
    rows: list[tuple[str, str]] = []
    for count, host in _runs(hardware.hosts):
        if count > 1:
            rows.append(("hosts", f"{count} of these"))
        rows += [("devices", f"{n} x {_device_text(device)}") for n, device in _runs(host.devices)]
        rows.append(("link", _link_text(host.link)))
        rows.append(("host memory", f"{host.memory_bytes / 1e9:.1f} GB"))
        words = (("instructions", host.instructions), ("interfaces", host.interfaces))
        rows += [(title, " ".join(found)) for title, found in words if found]
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
    return "; ".join(filter(None, (f"{device.name}: {', '.join(words)}", device.source)))


def _link_text(link: Link) -> str:
    figures = f"{link.bytes_per_s / 1e9:.3g} GB/s, {link.alpha_s * 1e6:.3g} µs"
    return "; ".join(filter(None, (f"{link.name}: {figures}", link.source)))
