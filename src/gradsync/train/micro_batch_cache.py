"""Micro-batches that were found by probing, kept in the user's cache: one file per kind of run.

As in `tuned.py` a file is believed only if it says for itself what it was measured for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsync.core.files import cache_entry, read_entry, write_entry
from gradsync.runtime import environ
from gradsync.train.tuned import RunConditions, check_entry, check_line, entry_document

_SAME_ROOM = (0.8, 1.25)
"""Times the memory there was when it was measured: with less it may not fit, with more it may be
too small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConditions(RunConditions):
    """Conditions that decide how much memory a leaf takes, and which sizes are legal."""

    activation_checkpointing: bool
    """Whether activations are recomputed."""
    loss_rows: int | None
    """Positions whose loss is computed at a time."""
    sizes: Sequence[int]
    """Legal micro-batches; they follow from the global batch and the number of ranks."""
    ranks_here: int
    """Ranks of a host."""
    sharded: bool
    """Whether ranks share out the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A micro-batch that ran."""

    size: int
    """Sequences of a leaf."""
    peak_bytes: int
    """Memory taken, on the rank with the least room."""
    limit_bytes: int
    """Memory that rank might have taken."""
    date: str
    """Date of the measurement."""

    def holds(self, limit_bytes: int) -> bool:
        """Whether it is still the answer where a rank may take `limit_bytes`."""
        least, most = (int(share * self.limit_bytes) for share in _SAME_ROOM)
        return self.peak_bytes <= limit_bytes and least <= limit_bytes <= most


def probed_path(conditions: ProbeConditions) -> Path:
    """Where the answer for `conditions` is kept.

    Raises:
        ConfigError: there is no home to keep a cache in.
    """
    key = json.dumps(asdict(conditions), sort_keys=True)
    return cache_entry(environ.cache_dir() / "micro-batch", key)


def save_probed(conditions: ProbeConditions, probed: Probed) -> Path:
    """Keep `probed`.

    Raises:
        ConfigError: see `probed_path`.
        RunError: the cache cannot be written.
    """
    return write_entry(probed_path(conditions), entry_document(conditions, probed))


def read_probed(conditions: ProbeConditions) -> Probed | None:
    """The entry kept for `conditions`; None when nothing was, or nothing that can be believed."""

    def build(document: Any) -> Probed:
        check_entry(document, conditions)
        numbers = {name: document[name] for name in ("size", "peak_bytes", "limit_bytes")}
        if any(type(number) is not int or number < 1 for number in numbers.values()):
            raise ValueError(f"sizes that cannot be: {numbers}")
        if numbers["size"] not in conditions.sizes:
            raise ValueError(f"size {numbers['size']} is not legal")
        return Probed(**numbers, date=check_line(document["date"]))

    return read_entry(probed_path(conditions), build)
