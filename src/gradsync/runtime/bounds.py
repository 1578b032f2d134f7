"""Whole numbers and times in what users write."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from gradsync.errors import ConfigError

LONGEST_S = 10**9
"""Seconds, about 32 years: clocks count nanoseconds in 64 bits."""
_INT64 = 2**63 - 1
MOST_RANKS = 4_096
"""Largest number of ranks on a host."""
MOST_NODES = 65_536


def whole_number(text: str, most: int = _INT64) -> int | None:
    """The number in `text`, in ASCII digits; None if there is no number, or it exceeds `most`."""
    number = int(text) if re.fullmatch("[0-9]{1,19}", text) else None
    return None if number is None or number > most else number


def check_times(options: Any) -> None:
    """Refuse times (fields that end in `_s`) of a dataclass that are not positive, or longer than
    clocks can count."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name.endswith("_s") and value is not None and not 0 < value <= LONGEST_S:
            raise ConfigError(f"{field.name} must be positive, at most {LONGEST_S}; got {value}")
