"""A mapping in a file that people write, read key by key, with errors that say where; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from gradsync.errors import ConfigError
from gradsync.hardware.described.units import SIZES, read_quantity
from gradsync.runtime.document import brief

_LARGEST = Decimal(10) ** 30


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
        """Words in one line."""
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, str):
            raise self.refuse(key, "text")
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
