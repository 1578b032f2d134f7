"""Networks by name, each with the source of its figures, and networks out of YAML files.

    name: two-sites            # optional; the file's name without it
    latency: 20ms              # of one message, one way
    bandwidth: 10Gbit/s        # in one direction
    per_host: true             # optional: one port for all ranks of a host
    source: measured by ...    # optional

The same keys as under `network` in a hardware file; units are those of `described/units.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigError
from gradsync.hardware.described.links import LINKS
from gradsync.hardware.described.units import RATES, TIMES, read_quantity
from gradsync.hardware.description import Link

_SUFFIXES = (".yaml", ".yml")
_NCCL = "NCCL's own model of a ring's step (src/graph/tuning.cc)"
_NETWORK_S = 9.6e-6
"""`_NCCL`, a step between hosts under protocol Simple, seconds."""
_TCP = 1448 / 1538
"""Payload of a full Ethernet frame: 1500 bytes less IP, TCP and time stamps (52); over those and
its 38 bytes of header, check sum, preamble and gap (IEEE 802.3)."""


def _infiniband(name: str, gigabits: float) -> Link:
    return Link(
        name=name,
        alpha_s=_NETWORK_S,
        bytes_per_s=gigabits * 1e9 / 8,
        source=f"InfiniBand Trade Association's rate, 4 lanes, a port per GPU; latency: {_NCCL}",
    )


def _ethernet(name: str, gigabits: float) -> Link:
    return Link(
        name=name,
        alpha_s=_NETWORK_S,
        bytes_per_s=gigabits * 1e9 / 8 * _TCP,
        per_host=True,
        source=f"line rate less the headers of TCP, one port a host; latency: {_NCCL}",
    )


def _wan(name: str, gigabits: float, latency_s: float) -> Link:
    return Link(
        name=name,
        alpha_s=latency_s,
        bytes_per_s=gigabits * 1e9 / 8 * _TCP,
        per_host=True,
        source="as its name says, one way; line rate less the headers of TCP, one port a host",
    )


NETWORKS: dict[str, Link] = {
    link.name: link
    for link in (
        *LINKS.values(),
        _infiniband("infiniband-hdr", 200),
        _infiniband("infiniband-ndr", 400),
        _ethernet("ethernet-10g", 10),
        _ethernet("ethernet-25g", 25),
        _ethernet("ethernet-100g", 100),
        _wan("wan-10g-20ms", 10, 0.020),
        _wan("wan-1g-50ms", 1, 0.050),
        _wan("wan-100m-100ms", 0.1, 0.100),
    )
}
"""What nobody measured here. The latency of TCP over Ethernet is above NCCL's figure where the
kernel is slow: measure it with `gradsync bench collectives`, and write a file."""


def load_network(name_or_path: str) -> Link:
    """The link of that name, or the one that a YAML file describes.

    Raises:
        ConfigError: unknown name, a file that is missing, or is not as the module says; one line
            with file, key, what it holds and what it should.
    """
    if name_or_path in NETWORKS:
        return NETWORKS[name_or_path]
    path = Path(name_or_path)
    if path.suffix in _SUFFIXES or path.is_file():
        return _read(path)
    near = get_close_matches(name_or_path, NETWORKS, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    raise ConfigError(
        f"unknown network {name_or_path!r}{hint} (there are: {', '.join(NETWORKS)}; or a file that "
        f"ends in {' or '.join(_SUFFIXES)})"
    )


def _read(path: Path) -> Link:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"network file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"network file {path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"network file {path}: is no YAML: {' '.join(str(error).split())}") from (
            error
        )
    if not isinstance(values, dict):
        raise ConfigError(
            f"network file {path}: got {type(values).__name__}, expected keys latency and bandwidth"
        )
    return _link(path, values)


def _link(path: Path, values: Mapping[Any, Any]) -> Link:
    known = ("name", "latency", "bandwidth", "per_host", "source")
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise ConfigError(
                f"network file {path}: unknown key {key!r}{hint} (there are: {', '.join(known)})"
            )
    per_host = values.get("per_host", False)
    if not isinstance(per_host, bool):
        raise ConfigError(
            f"network file {path}: per_host: got {per_host!r}, expected true or false"
        )
    return Link(
        name=_text(path, values, "name", path.stem),
        alpha_s=_quantity(path, values, "latency", TIMES, "a time such as 50ms or 5us"),
        bytes_per_s=_quantity(
            path, values, "bandwidth", RATES, "a rate above 0 such as 10Gbit/s or 1.25GB/s"
        ),
        per_host=per_host,
        source=_text(path, values, "source", f"file {path.name}"),
    )


def _quantity(
    path: Path, values: Mapping[Any, Any], key: str, units: Mapping[str, Decimal], wanted: str
) -> float:
    if key not in values:
        raise ConfigError(f"network file {path}: {key} is missing, expected {wanted}")
    number = read_quantity(values[key], units)
    if number is None or number < 0 or (number == 0 and units is RATES):
        raise ConfigError(f"network file {path}: {key}: got {values[key]!r}, expected {wanted}")
    return float(number)


def _text(path: Path, values: Mapping[Any, Any], key: str, default: str) -> str:
    value = values.get(key, default)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"network file {path}: {key}: got {value!r}, expected text")
    return value
