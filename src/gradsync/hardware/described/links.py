"""Links between the devices of a host: NVLink, PCIe, memory; pure.

Two figures each. What the bus could carry is in its standard. What arrives is less, and a plan made
with the former is too good; so `bytes_per_s` is what NCCL itself reckons with, per link:
`src/graph/topo.h` at commit 069a3d4 (SM70_NVLINK_BW …, PCI_BW), and `src/graph/tuning.cc` at commit
01afd20 for the latency (hwLat; ring, simple protocol).
"""

from __future__ import annotations

from gradsync.errors import ConfigError
from gradsync.hardware.description import Link

_NVLINK_ALPHA_S = 3.4e-6
_PCIE_ALPHA_S = 5.7e-6

_NVLINK = {2: (25e9, 20e9), 3: (25e9, 20e9), 4: (25e9, 20.6e9), 5: (50e9, 40.1e9)}
"""Of one link, one direction, bytes per second: as specified, and as NCCL reckons."""
_GA102_NVLINK = (14.0625e9, 12e9)
"""NVLink 3 as in RTX 3090, A40 and A6000 (compute capability 8.6)."""
_PCIE_LANE = {generation: 0.75e9 * 2 ** (generation - 3) for generation in range(1, 7)}
"""Of one lane, one direction, as NCCL reckons: 12 GB/s for PCIe 3 x16, doubling each time."""
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


def link_of(name: str) -> Link:
    """One of `LINKS`.

    Raises:
        ConfigError: unknown name.
    """
    if name not in LINKS:
        raise ConfigError(f"unknown link {name!r} (there are: {', '.join(LINKS)})")
    return LINKS[name]
