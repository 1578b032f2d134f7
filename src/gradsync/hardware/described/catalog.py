"""Devices that have data sheets, with their public figures; pure.

Two uses: machines that are not here are described by name (`h100x4`), and a detected device, whose
memory is always measured, finds its peak arithmetic under the name that its driver gives.

A catalogued memory is the data sheet's, in decimal GB. Drivers report some percent more (an "80 GB"
H100 has 85.5e9 bytes), so what is planned here fits there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from gradsync.errors import ConfigError
from gradsync.hardware.description import Device

GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A product, as its data sheet has it."""

    name: str
    """What its driver calls it."""
    memory_gb: int
    """Decimal."""
    tflops: float
    """Dense bf16 products (fp16 where it has no bf16) with sums in fp32; 1e12 per second. Data
    sheets that state the doubled rate for sparse matrices are halved."""
    gb_per_s: float
    """Of its memory; 1e9 bytes per second."""
    capability: tuple[int, int]
    """Compute capability."""
    num_sms: int
    """Streaming multiprocessors, of which a MIG slice gets some."""
    link: str
    """Of `links.LINKS`: to the other devices of a usual host. Cards whose NVLink is a bridge that
    one may buy have PCIe here."""
    source: str
    """Who says so."""

    def device(self) -> Device:
        """The whole of it, nothing taken."""
        return Device(
            kind="cuda",
            name=self.name,
            memory_bytes=self.memory_gb * GB,
            peak_flops=self.tflops * 1e12,
            compute_capability=self.capability,
            memory_bytes_per_s=self.gb_per_s * 1e9,
            source=self.source,
        )


_SHEET = "NVIDIA data sheet"
_PAPER = "NVIDIA architecture white paper"
_FP16 = f"{_SHEET}; fp16, it has no bf16 units"

_COLUMNS = (
    *("name", "memory_gb", "tflops", "gb_per_s", "capability", "num_sms", "link", "source"),
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "b200": ("NVIDIA B200", 180, 2250, 7700, (10, 0), 148, "nvlink5", _SHEET),
    "h200": ("NVIDIA H200", 141, 989.5, 4800, (9, 0), 132, "nvlink4", _SHEET),
    "h200-nvl": ("NVIDIA H200 NVL", 141, 835.5, 4800, (9, 0), 132, "pcie5", _SHEET),
    "h100": ("NVIDIA H100 80GB HBM3", 80, 989.5, 3350, (9, 0), 132, "nvlink4", _SHEET),
    "h100-nvl": ("NVIDIA H100 NVL", 94, 835.5, 3900, (9, 0), 132, "pcie5", _SHEET),
    "h100-pcie": ("NVIDIA H100 PCIe", 80, 756.5, 2000, (9, 0), 114, "pcie5", _SHEET),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 80, 312, 2039, (8, 0), 108, "nvlink3", _SHEET),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40, 312, 1555, (8, 0), 108, "nvlink3", _SHEET),
    "a100-80-pcie": ("NVIDIA A100 80GB PCIe", 80, 312, 1935, (8, 0), 108, "pcie4", _SHEET),
    "a100-40-pcie": ("NVIDIA A100-PCIE-40GB", 40, 312, 1555, (8, 0), 108, "pcie4", _SHEET),
    "a30": ("NVIDIA A30", 24, 165, 933, (8, 0), 56, "pcie4", _SHEET),
    "a40": ("NVIDIA A40", 48, 149.7, 696, (8, 6), 84, "pcie4", _SHEET),
    "a10": ("NVIDIA A10", 24, 125, 600, (8, 6), 72, "pcie4", _SHEET),
    "a6000": ("NVIDIA RTX A6000", 48, 154.8, 768, (8, 6), 84, "pcie4", _PAPER),
    "l40s": ("NVIDIA L40S", 48, 362, 864, (8, 9), 142, "pcie4", _SHEET),
    "l40": ("NVIDIA L40", 48, 181, 864, (8, 9), 142, "pcie4", _SHEET),
    "l4": ("NVIDIA L4", 24, 121, 300, (8, 9), 58, "pcie4", _SHEET),
    "t4": ("Tesla T4", 16, 65, 300, (7, 5), 40, "pcie3", _FP16),
    "v100-32": ("Tesla V100-SXM2-32GB", 32, 125, 900, (7, 0), 80, "nvlink2", _FP16),
    "v100-16": ("Tesla V100-SXM2-16GB", 16, 125, 900, (7, 0), 80, "nvlink2", _FP16),
    "v100-32-pcie": ("Tesla V100-PCIE-32GB", 32, 112, 900, (7, 0), 80, "pcie3", _FP16),
    "v100-16-pcie": ("Tesla V100-PCIE-16GB", 16, 112, 900, (7, 0), 80, "pcie3", _FP16),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32, 209.5, 1792, (12, 0), 170, "pcie5", _PAPER),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24, 165.2, 1008, (8, 9), 128, "pcie4", _PAPER),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24, 71, 936, (8, 6), 82, "pcie4", _PAPER),
}
MODELS = {key: Model(**dict(zip(_COLUMNS, row, strict=True))) for key, row in _ROWS.items()}
"""By the name that users type."""

_FLOP_PER_CYCLE = {
    **{(7, 0): 1024, (7, 2): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 7): 1024},
    **{(8, 9): 512, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 512, (12, 1): 512},
}
"""Dense 16-bit products with fp32 sums, of one multiprocessor, by compute capability. From the
white papers' peak / (multiprocessors x boost clock), such as 312e12 / (108 x 1.41e9) = 2049; where
GeForce parts run at half the rate of professional ones, theirs."""
_OLDER, _NEWER = 128, 512
"""For capabilities that are not in the table."""
_USUAL_CLOCK_HZ = 1.5e9
_COMPUTE_SLICES = 7
_SLICE = re.compile(r"(.+)-(\d{1,3})g\.(\d{1,9})gb", re.ASCII)


def by_driver_name(name: str) -> Model | None:
    """The model of a device that calls itself `name`; None when no data sheet is known for it."""
    wanted = _bare(name)
    return next((model for model in MODELS.values() if _bare(model.name) == wanted), None)


def _bare(name: str) -> str:
    """Older drivers leave the maker out."""
    return name.strip().lower().removeprefix("nvidia ")


def device_of(key: str) -> Device:
    """A catalogued device, or a MIG slice of one: `h100`, `a100-40`, `a100-80-3g.40gb`.

    A slice's name is its profile's: sevenths of the arithmetic, and decimal GB of memory with the
    share of the bandwidth that goes with them.

    Raises:
        ConfigError: unknown name (the message has the nearest), or a slice larger than the whole.
    """
    if key in MODELS:
        return MODELS[key].device()
    found = _SLICE.fullmatch(key)
    if found is None or found[1] not in MODELS:
        raise ConfigError(f"unknown device {key!r}{nearest(found[1] if found else key)}")
    whole, slices, memory = MODELS[found[1]].device(), int(found[2]), int(found[3]) * GB
    if not 1 <= slices <= _COMPUTE_SLICES or not 0 < memory <= whole.memory_bytes:
        raise ConfigError(
            f"device {key!r}: a slice of {found[1]} has 1 to {_COMPUTE_SLICES} compute slices and "
            f"at most {whole.memory_bytes // GB} GB"
        )
    part = slice_of(whole, arithmetic=slices / _COMPUTE_SLICES, memory_bytes=memory)
    return replace(part, name=f"{whole.name} MIG {slices}g.{memory // GB}gb")


def slice_of(whole: Device, *, arithmetic: float, memory_bytes: int) -> Device:
    """A part of a GPU with a share of its arithmetic, and of its bandwidth as of its memory."""
    rate = whole.memory_bytes_per_s
    share = memory_bytes / whole.memory_bytes
    return replace(
        whole,
        memory_bytes=memory_bytes,
        free_bytes=None,
        peak_flops=whole.peak_flops * arithmetic,
        memory_bytes_per_s=None if rate is None else rate * share,
        mig=True,
    )


def nearest(key: str) -> str:
    """What an error message says about an unknown device: the likeliest names, then all."""
    family = [name for name in MODELS if name.startswith(f"{key}-")]
    near = family or get_close_matches(key, MODELS, n=2)
    hint = f"; perhaps {' or '.join(near)}" if near else ""
    return f"{hint} (there are: {', '.join(MODELS)})"


def rates_of(
    name: str, capability: tuple[int, int], num_sms: int, clock_hz: float | None
) -> tuple[float, float | None, str]:
    """Peak arithmetic and memory bandwidth of a detected device, and where they come from.

    Args:
        name: as its driver has it; what no data sheet describes is estimated from the rest.
        capability: compute capability.
        num_sms: streaming multiprocessors.
        clock_hz: at most; None where it is not told.
    """
    model = by_driver_name(name)
    if model is not None:
        return model.tflops * 1e12, model.gb_per_s * 1e9, model.source
    clock, assumed = clock_hz or _USUAL_CLOCK_HZ, "" if clock_hz else " (assumed)"
    source = (
        f"estimate: {num_sms} multiprocessors of compute capability "
        f"{capability[0]}.{capability[1]} x {clock / 1e9:.3g} GHz{assumed}"
    )
    return estimated_flops(capability, num_sms, clock), None, source


def estimated_flops(capability: tuple[int, int], num_sms: int, clock_hz: float) -> float:
    """Peak of a device without a data sheet here, from its generation, size and clock."""
    newer = capability >= (7, 0)
    per_cycle = _FLOP_PER_CYCLE.get(capability, _NEWER if newer else _OLDER)
    return per_cycle * num_sms * clock_hz
