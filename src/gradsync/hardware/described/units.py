"""Sizes, rates and times as people write them (`80GB`, `900GB/s`, `5us`), read and written; pure.

Decimal arithmetic throughout: what is written is read back as the same number, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\D\S*)?", re.ASCII)

_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BYTES = {f"{prefix}B": Decimal(10) ** power for prefix, power in _PREFIXES.items()}
_BINARY = {f"{prefix}iB": Decimal(1024) ** n for n, prefix in enumerate("KMGTP", start=1)}
_BITS = {f"{prefix}bit": Decimal(10) ** power / 8 for prefix, power in _PREFIXES.items()}
_FLOP = {
    f"{prefix}{word}": Decimal(10) ** power
    for word in ("FLOP/s", "FLOPS")
    for prefix, power in _PREFIXES.items()
}

SIZES: Mapping[str, Decimal] = {"": Decimal(1), **_BYTES, **_BINARY}
"""Bytes by unit. A bare number is bytes."""
RATES: Mapping[str, Decimal] = {
    "": Decimal(1),
    **{f"{unit}/s": size for unit, size in (_BYTES | _BINARY | _BITS).items()},
}
"""Bytes per second by unit; networks are sold in bits."""
FLOPS: Mapping[str, Decimal] = {"": Decimal(1), **_FLOP}
"""Floating-point operations per second by unit."""
TIMES: Mapping[str, Decimal] = {
    **{"": Decimal(1), "s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")},
    **{"µs": Decimal("1e-6"), "ns": Decimal("1e-9")},
}
"""Seconds by unit."""


def read_quantity(value: Any, units: Mapping[str, Decimal]) -> Decimal | None:
    """The number that `value` says, in the base unit of `units`; None when it says none.

    Args:
        value: text such as "3.35TB/s", or a plain number in the base unit.
        units: one of the tables here.
    """
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
    return write_quantity(size, _BYTES)


def write_rate(bytes_per_s: float) -> str:
    """Bytes per second, such as "3.35TB/s"."""
    return write_quantity(bytes_per_s, _BYTES) + "/s"


def write_flops(flops: float) -> str:
    """Floating-point operations per second, such as "989TFLOP/s"."""
    units = {unit: size for unit, size in _FLOP.items() if unit.endswith("/s")}
    return write_quantity(flops, units)


def write_time(seconds: float) -> str:
    """Seconds, such as "3.4us"."""
    return write_quantity(seconds, {unit: TIMES[unit] for unit in ("ns", "us", "ms", "s")})


def write_quantity(number: float, units: Mapping[str, Decimal]) -> str:
    """`number` in the largest of `units` that leaves at least 1; the units ascend by tens."""
    exact = Decimal(repr(number))
    fitting = [unit for unit, size in units.items() if abs(exact) >= size] or [next(iter(units))]
    unit = fitting[-1]
    scaled = exact / units[unit]
    text = f"{scaled:f}"
    # Far beyond the units' reach a row of zeros says nothing.
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text if len(text) <= 24 else scaled}{unit}"
