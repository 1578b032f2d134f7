"""Networks by name, each with the source of its figures, and networks out of YAML files.

    name: two-sites            # optional; the file's name without it
    latency: 20ms              # of one message, one way
    bandwidth: 10Gbit/s        # in one direction
    per_host: true             # optional: one port for all ranks of a host
    source: measured by ...    # optional

The same keys as under `network` in a hardware file; units are those of `described/units.py`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from gradsync.errors import ConfigError
from gradsync.hardware.described.links import LINKS
from gradsync.hardware.described.section import Section
from gradsync.hardware.described.units import RATES, TIMES
from gradsync.hardware.description import Link
from gradsync.runtime.document import read_document

_SUFFIXES = (".yaml", ".yml")
_KEYS = ("name", "latency", "bandwidth", "per_host", "source")
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
    document = read_document(path, "network file")
    part = Section.of(document.values, document.where, _KEYS)
    return Link(
        name=part.text("name", path.stem),
        alpha_s=part.quantity("latency", TIMES, "a time such as 50ms or 5us", zero=True),
        bytes_per_s=part.quantity("bandwidth", RATES, "a rate such as 10Gbit/s or 1.25GB/s"),
        per_host=part.flag("per_host", False),
        source=part.text("source", f"file {path.name}"),
    )
