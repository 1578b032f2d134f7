"""A mapping in a file that people write, read key by key, with errors that say where; pure.

Sizes, rates and times are read as people write them (`80GB`, `900GB/s`, `5us`), and written so, in
decimal arithmetic: what is written is read back as the same number, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from gradsync.core.document import brief
from gradsync.errors import ConfigError

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


_LARGEST = Decimal(10) ** 30
_LONGEST_TEXT = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Keys and values, and the way that leads to them.

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

    def refuse(self, key: str, expected: str) -> ConfigError:
        """The error about the value of `key`."""
        if not self.has(key):
            return ConfigError(f"{self.at(key)} is missing; expected {expected}")
        return ConfigError(f"{self.at(key)}: got {brief(self.values[key])}, expected {expected}")

    def section(self, key: str, known: Collection[str]) -> Section:
        """The section under `key`."""
        return Section.of(self.values.get(key), self.at(key), known)

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

    def size(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        """Whole bytes; a fraction of one is left out."""
        if not self.has(key) and default is not None:
            return default
        number = read_quantity(self.values.get(key), SIZES)
        if number is None or not (0 if zero else 1) <= number <= _LARGEST:
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

    def at(self, key: str) -> str:
        """The way that leads to the value of `key`."""
        return f"{self.where}.{key}" if ": " in self.where else f"{self.where}: {key}"
