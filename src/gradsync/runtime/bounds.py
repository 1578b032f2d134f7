"""Refuse numbers that no run can use, by name, before they reach a socket, a clock or a kernel.

The owner of a number checks its meaning. This module checks what the system cannot take: seconds
beyond its clocks, numbers beyond 64 bits or NaN, ranks and threads that would exhaust the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from gradsync.errors import ConfigError

LONGEST_S = 10**9
"""Seconds, about 32 years: clocks count nanoseconds in 64 bits."""
_INT64 = 2**63 - 1
MOST_RANKS = 4_096
"""Largest number of ranks on a host."""
MOST_NODES = 65_536
_MOST = {
    "silence_s": 86_400,  # seconds in the options of a TCP socket end at 32,767, five times this
    **dict.fromkeys(("world_size", "nproc_per_node", "num_workers", "threads"), MOST_RANKS),
    **dict.fromkeys(("nodes", "nnodes"), MOST_NODES),
}


def whole_number(text: str, most: int = _INT64) -> int | None:
    """The number in `text`, in ASCII digits; None if there is no number, or it exceeds `most`."""
    number = int(text) if re.fullmatch("[0-9]{1,19}", text) else None
    return None if number is None or number > most else number


def check_numbers(options: Any, spell: Callable[[str], str] = str) -> None:
    """Refuse unusable numbers in a dataclass and in the dataclasses nested in it: NaN, more than
    `_MOST` or 64 bits, and times (`_s`) that are not positive or exceed `LONGEST_S`.

    Args:
        spell: maps a field's name to the name that the user wrote.
    """
    for field in fields(options):
        name, value = spell(field.name), getattr(options, field.name)
        if is_dataclass(value):
            check_numbers(value, lambda inner, outer=field.name: spell(f"{outer}.{inner}"))
        elif isinstance(value, int | float):
            seconds = field.name.endswith("_s")
            most = _MOST.get(field.name, LONGEST_S if seconds else _INT64)
            if seconds and not value > 0:
                raise ConfigError(f"{name} must be positive; got {value}")
            if not abs(value) <= most:
                raise ConfigError(f"{name} must be a number, at most {most}; got {str(value)[:40]}")
