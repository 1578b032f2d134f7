"""Hardware as text: `--hardware NAME|FILE`, `--network NAME|FILE`, and the file that is written.

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
of a host are those of one that is only named. A network's own file has the keys of `network`; its
name may be left out. Units: `80GB`, `80GiB`, `3.35TB/s`, `400Gbit/s`, `989TFLOP/s`, `5us`; a bare
number counts bytes, seconds or operations. They are read and written in decimal arithmetic: what is
written is read back as the same number, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from gradsync.core.document import brief, read_document
from gradsync.errors import ConfigError
from gradsync.plan.catalog import (
    LINKS,
    NETWORKS,
    check_size,
    device_of,
    hardware_of,
    host_of,
    usual_host,
)
from gradsync.plan.description import Device, Hardware, Host, Kind, Link

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
"""Bytes per second by unit; networks are sold in bits."""
FLOPS: Mapping[str, Decimal] = {
    **{"": Decimal(1), **_FLOP},
    **{f"{prefix}FLOPS": size for prefix, size in _TENS.items()},
}
"""Floating-point operations per second by unit."""
TIMES: Mapping[str, Decimal] = {"": Decimal(1), "µs": Decimal("1e-6"), **_SECONDS}
"""Seconds by unit."""


def read_quantity(value: Any, units: Mapping[str, Decimal]) -> Decimal | None:
    """The number that text such as "3.35TB/s", or a plain number, says in the base unit of `units`;
    None when it says none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = _NUMBER.fullmatch(str(value).strip())
    if found is None or (found[2] or "") not in units:
        return None
    return Decimal(found[1]) * units[found[2] or ""]


def write_bytes(size: int) -> str:
    """`size` in the unit that suits it: "80GiB", "141GB", "85.899345919GB"."""
    if size % 2**30 == 0 and size % 10**9:
        return f"{size // 2**30}GiB"
    return _write(size, _BYTES)


def write_rate(bytes_per_s: float) -> str:
    """Bytes per second, such as "3.35TB/s"."""
    return _write(bytes_per_s, _BYTES) + "/s"


def write_flops(flops: float) -> str:
    """Floating-point operations per second, such as "989TFLOP/s"."""
    return _write(flops, _FLOP)


def write_time(seconds: float) -> str:
    """Seconds, such as "3.4us"."""
    return _write(seconds, _SECONDS)


def _write(number: float, units: Mapping[str, Decimal]) -> str:
    """`number` in the largest of `units`, which ascend, that leaves at least 1."""
    exact = Decimal(repr(number))
    fitting = [unit for unit, size in units.items() if abs(exact) >= size] or [next(iter(units))]
    unit = fitting[-1]
    scaled = exact / units[unit]
    text = f"{scaled:f}"
    # Far beyond the units' reach a row of zeros says nothing.
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text if len(text) <= 24 else scaled}{unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Keys and values of a file that people write, and the way that leads to them.

    What a method reads raises ConfigError, in one line, when it is missing without a default or is
    not what it should be. An empty value (YAML's null) counts as left out.
    """

    where: str
    """Such as `hardware file a.yaml: hosts[0].link`."""
    values: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any, where: str, known: Collection[str]) -> Section:
        """`value` as a section that has none but `known` keys."""
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where}: got {brief(value)}, expected keys and values ({', '.join(known)})"
            )
        for key in value:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"; perhaps {near[0]!r}" if near else ""
                raise ConfigError(
                    f"{where}: unknown key {brief(key)}{hint} (there are: {', '.join(known)})"
                )
        return cls(where=where, values=value)

    def has(self, key: str) -> bool:
        """Whether the key is there, with a value."""
        return self.values.get(key) is not None

    def at(self, key: str) -> str:
        """The way that leads to the value of `key`."""
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

    def quantity(
        self,
        key: str,
        units: Mapping[str, Decimal],
        expected: str,
        default: float | None = None,
        *,
        zero: bool = False,
    ) -> float:
        """A number above 0 (or from 0 on, with `zero`), with one of `units`."""
        if not self.has(key) and default is not None:
            return default
        number = read_quantity(self.values.get(key), units)
        if number is None or not (0 < number <= _LARGEST or (zero and number == 0)):
            raise self.refuse(key, expected)
        return float(number)

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Whole bytes; a fraction of one is left out."""
        if not self.has(key) and default is not None:
            return default
        number = read_quantity(self.values.get(key), SIZES)
        if number is None or not least <= number <= _LARGEST:
            raise self.refuse(key, "a size such as 80GB or 80GiB")
        return int(number)

    def count(self, key: str, default: int = 1) -> int:
        """A whole number, at least 1."""
        value = self.values[key] if self.has(key) else default
        if type(value) is not int or value < 1:
            raise self.refuse(key, "a whole number, at least 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values[key] if self.has(key) else default
        if type(value) is not bool:
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Words, so few that an error may repeat them."""
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, str):
            raise self.refuse(key, "text")
        if len(value) > _LONGEST_TEXT:
            raise self.refuse(key, f"at most {_LONGEST_TEXT} characters")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of words; none when left out."""
        value = self.values[key] if self.has(key) else []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.refuse(key, "a list of words")
        return tuple(value)

    def named(self, key: str, find: Callable[[str], T]) -> T:
        """The text under `key` through `find`, whose error gets the place."""
        text = self.text(key)
        try:
            return find(text)
        except ConfigError as error:
            raise ConfigError(f"{self.at(key)}: {error}") from None


_SUFFIXES = (".yaml", ".yml", ".json")
_HARDWARE = ("hosts", "network", "notes")
_HOST = ("count", "devices", "link", "cores", "memory", "instructions", "interfaces")
_DEVICE = (
    *("count", "type", "name", "kind", "memory", "free", "flops", "bandwidth"),
    *("compute_capability", "mig", "shared", "source"),
)
_LINK = ("name", "latency", "bandwidth", "per_host", "source")
_KINDS = ("cuda", "cpu")
_A_RATE = "a rate such as 3.35TB/s or 400Gbit/s"
_A_SPEED = "a rate such as 989TFLOP/s"


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware that a file (.yaml, .yml, .json) describes or a name such as h100x4 stands for.

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


def load_network(name_or_path: str) -> Link:
    """The link of that name, or the one that a YAML file describes.

    Raises:
        ConfigError: as `load_hardware`.
    """
    if name_or_path in NETWORKS:
        return NETWORKS[name_or_path]
    path, suffixes = Path(name_or_path), _SUFFIXES[:2]
    if path.suffix in suffixes or path.is_file():
        document = read_document(path, "network file")
        section = Section.of(document.values, document.where, _LINK)
        return _read_link(section, path.stem, f"file {path.name}")
    near = get_close_matches(name_or_path, NETWORKS, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    raise ConfigError(
        f"unknown network {name_or_path!r}{hint} (there are: {', '.join(NETWORKS)}; or a file that "
        f"ends in {' or '.join(suffixes)})"
    )


def read_hardware(document: Any, where: str) -> Hardware:
    """The hardware that a file's content describes; `where` begins the errors."""
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
        host = section.named("devices", host_of)
    else:  # listed; the rest as of a host that is only named
        devices: list[tuple[str, Device]] = []
        for part in section.sections("devices", _DEVICE):
            count = part.count("count")
            check_size(len(devices) + count, part.where)
            devices += [(part.text("type", ""), _device(part))] * count
        host = usual_host(devices)
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
    if not isinstance(section.values[key], str):
        return _read_link(Section.of(section.values[key], section.at(key), _LINK))
    name = section.text(key)
    if name not in known:
        there = f"unknown {key} {name!r} (there are: {', '.join(known)})"
        raise ConfigError(f"{section.at(key)}: {there}")
    return known[name]


def _read_link(part: Section, name: str | None = None, source: str = "") -> Link:
    """A link by its figures; `name` and `source` where the section has none."""
    return Link(
        name=part.text("name", name),
        alpha_s=part.quantity("latency", TIMES, "a time such as 5us", zero=True),
        bytes_per_s=part.quantity("bandwidth", RATES, "a rate such as 10Gbit/s or 1.25GB/s"),
        per_host=part.flag("per_host", False),
        source=part.text("source", source),
    )


def _device(section: Section) -> Device:
    if section.has("type"):
        start = section.named("type", device_of)
        if section.has("flops") or section.has("bandwidth"):
            start = replace(start, source="given")
    else:
        start = Device(
            kind="cuda",
            name=section.text("name"),
            memory_bytes=section.size("memory"),
            peak_flops=section.quantity("flops", FLOPS, _A_SPEED),
        )
    memory = section.size("memory", start.memory_bytes)
    free = section.size("free", least=0) if section.has("free") else None
    if free is not None and free > memory:
        raise section.refuse("free", f"at most the device's memory, {memory} bytes")
    kind = section.text("kind", start.kind)
    if kind not in _KINDS:
        raise section.refuse("kind", " or ".join(_KINDS))
    rate = start.memory_bytes_per_s
    if section.has("bandwidth"):
        rate = section.quantity("bandwidth", RATES, _A_RATE)
    return Device(
        kind=cast(Kind, kind),
        name=section.text("name", start.name),
        memory_bytes=memory,
        free_bytes=free,
        peak_flops=section.quantity("flops", FLOPS, _A_SPEED, start.peak_flops),
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
        **({"notes": list(hardware.notes)} if hardware.notes else {}),
    }


def _host_document(host: Host) -> dict[str, Any]:
    devices = [_counted(count, _device_document(device)) for count, device in _runs(host.devices)]
    words = {"instructions": list(host.instructions), "interfaces": list(host.interfaces)}
    return {
        "devices": devices,
        "link": _link_document(host.link, LINKS),
        "cores": host.cores,
        "memory": write_bytes(host.memory_bytes),
        **{key: value for key, value in words.items() if value},
    }


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
    return {
        "name": link.name,
        "latency": write_time(link.alpha_s),
        "bandwidth": write_rate(link.bytes_per_s),
        **({"per_host": True} if link.per_host else {}),
        **({"source": link.source} if link.source else {}),
    }


def _counted(count: int, document: dict[str, Any]) -> dict[str, Any]:
    return {"count": count, **document} if count > 1 else document


def _runs(values: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Equal neighbours as one, with their number."""
    for value, same in groupby(values):
        yield len(list(same)), value


def hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    """Titles and lines for people; equal devices and equal hosts in one."""
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
