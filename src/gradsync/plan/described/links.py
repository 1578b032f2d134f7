"""Links by name, each with the source of its figures: NVLink and PCIe inside a host, and networks.

Inside a host: what the bus could carry is in its standard. What arrives is less, and a plan made
with the former is too good; so `bytes_per_s` is what NCCL itself reckons with, per link:
`src/graph/topo.h` at commit 069a3d4 (SM70_NVLINK_BW …, PCI_BW), and `src/graph/tuning.cc` at commit
01afd20 for the latency (hwLat; ring, simple protocol).

A network may also be a YAML file, with the keys that stand under `network` in a hardware file:

    name: two-sites            # optional; the file's name without it
    latency: 20ms              # of one message, one way
    bandwidth: 10Gbit/s        # in one direction
    per_host: true             # optional: one port for all ranks of a host
    source: measured by ...    # optional
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from gradsync.core.document import read_document
from gradsync.errors import ConfigError
from gradsync.plan.described.section import RATES, TIMES, Section
from gradsync.plan.description import Link

_SUFFIXES = (".yaml", ".yml")
LINK_KEYS = ("name", "latency", "bandwidth", "per_host", "source")
_NCCL = "NCCL's own model of a ring's step (src/graph/tuning.cc)"
_NETWORK_S = 9.6e-6
"""`_NCCL`, a step between hosts under protocol Simple, seconds."""
_TCP_PART = 1448 / 1538
"""Payload of a full Ethernet frame: 1500 bytes less IP, TCP and time stamps (52); over those and
its 38 bytes of header, check sum, preamble and gap (IEEE 802.3)."""
_NVLINK_ALPHA_S = 3.4e-6
_PCIE_ALPHA_S = 5.7e-6

_NVLINK = {2: (25e9, 20e9), 3: (25e9, 20e9), 4: (25e9, 20.6e9), 5: (50e9, 40.1e9)}
"""One link, one direction, bytes per second: as specified, and as NCCL reckons."""
_GA102_NVLINK = (14.0625e9, 12e9)
"""NVLink 3 as in RTX 3090, A40 and A6000 (compute capability 8.6)."""
_PCIE_LANE = {generation: 0.75e9 * 2 ** (generation - 3) for generation in range(1, 7)}
"""One lane, one direction, as NCCL reckons: 12 GB/s for PCIe 3 x16, doubling each time."""
_GENERATIONS = {(7, 0): 2, (7, 2): 2, (7, 5): 2, (8, 0): 3, (8, 6): 3, (9, 0): 4, (10, 0): 5}
"""NVLink by compute capability."""
_NEWEST = 5


def nvlink(capability: tuple[int, int], links: int) -> Link:
    """`links` NVLinks side by side, between devices of such a compute capability."""
    generation = _GENERATIONS.get(capability, _NEWEST if capability >= (10, 0) else 2)
    specified, reckoned = _GA102_NVLINK if capability == (8, 6) else _NVLINK[generation]
    return Link(
        name=f"nvlink{generation}",
        alpha_s=_NVLINK_ALPHA_S,
        bytes_per_s=links * reckoned,
        source=(
            f"NCCL's own figure for {links} links, "
            f"{links * specified / 1e9:.4g} GB/s as specified; one direction"
        ),
    )


def pcie(generation: int, lanes: int = 16) -> Link:
    """PCI express, between devices of one host."""
    generation = min(max(generation, 1), max(_PCIE_LANE))
    return Link(
        name=f"pcie{generation}",
        alpha_s=_PCIE_ALPHA_S,
        bytes_per_s=lanes * _PCIE_LANE[generation],
        source=f"NCCL's own figure for x{lanes}; one direction",
    )


LINKS = {
    "nvlink2": nvlink((7, 0), 6),
    "nvlink3": nvlink((8, 0), 12),
    "nvlink4": nvlink((9, 0), 18),
    "nvlink5": nvlink((10, 0), 18),
    **{f"pcie{generation}": pcie(generation) for generation in (3, 4, 5, 6)},
}
"""By the name that users type: all links of one device, and PCIe by 16 lanes."""


def link_of(name: str, known: Mapping[str, Link] = LINKS, kind: str = "link") -> Link:
    """One of `known`.

    Raises:
        ConfigError: unknown name.
    """
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r} (there are: {', '.join(known)})")
    return known[name]


def read_link(part: Section, name: str | None = None, source: str = "") -> Link:
    """A link by its figures.

    Args:
        part: a section of `LINK_KEYS`.
        name: where the section has none; None: it must have one.
        source: where the section has none.

    Raises:
        ConfigError: see `Section`.
    """
    return Link(
        name=part.text("name", name),
        alpha_s=part.quantity("latency", TIMES, "a time such as 5us", zero=True),
        bytes_per_s=part.quantity("bandwidth", RATES, "a rate such as 10Gbit/s or 1.25GB/s"),
        per_host=part.flag("per_host", False),
        source=part.text("source", source),
    )


def _infiniband(name: str, gigabits: float) -> Link:
    return Link(
        name=name,
        alpha_s=_NETWORK_S,
        bytes_per_s=gigabits * 1e9 / 8,
        source=f"InfiniBand Trade Association's rate, 4 lanes, a port per GPU; latency: {_NCCL}",
    )


def _tcp(name: str, gigabits: float, latency_s: float | None = None) -> Link:
    """Ethernet, or a distance whose latency its name says."""
    source = "line rate less the headers of TCP, one port a host"
    return Link(
        name=name,
        alpha_s=_NETWORK_S if latency_s is None else latency_s,
        bytes_per_s=gigabits * 1e9 / 8 * _TCP_PART,
        per_host=True,
        source=f"{source}; latency: {_NCCL}"
        if latency_s is None
        else f"as its name says, one way; {source}",
    )


NETWORKS: dict[str, Link] = {
    link.name: link
    for link in (
        *LINKS.values(),
        _infiniband("infiniband-hdr", 200),
        _infiniband("infiniband-ndr", 400),
        _tcp("ethernet-10g", 10),
        _tcp("ethernet-25g", 25),
        _tcp("ethernet-100g", 100),
        _tcp("wan-10g-20ms", 10, 0.020),
        _tcp("wan-1g-50ms", 1, 0.050),
        _tcp("wan-100m-100ms", 0.1, 0.100),
    )
}
"""Not measured here. The latency of TCP over Ethernet is above NCCL's figure where the
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
        document = read_document(path, "network file")
        part = Section.of(document.values, document.where, LINK_KEYS)
        return read_link(part, path.stem, f"file {path.name}")
    near = get_close_matches(name_or_path, NETWORKS, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    raise ConfigError(
        f"unknown network {name_or_path!r}{hint} (there are: {', '.join(NETWORKS)}; or a file that "
        f"ends in {' or '.join(_SUFFIXES)})"
    )
