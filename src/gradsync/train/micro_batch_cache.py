"""Micro-batches that were found by probing, kept in the user's cache: one file per kind of run.

As in `tuned.py` a file is believed only if it says for itself what it was measured for. No torch
here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsync.errors import RunError
from gradsync.runtime import environ
from gradsync.runtime.text_file import json_text, read_json, write_text

FORMAT_VERSION = 1
_SAME_ROOM = (0.8, 1.25)
"""Times the memory there was when it was measured: with less it may not fit, with more it may be
too small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConditions:
    """What decides how much memory a leaf takes, and which sizes are legal."""

    model: Mapping[str, Any]
    """The shape, see `tuned.shape_of`, and its dropout."""
    dtype: str
    """bf16, fp16 or fp32."""
    seq_len: int
    """Tokens of a sequence."""
    activation_checkpointing: bool
    """Whether activations are recomputed."""
    loss_rows: int | None
    """Positions whose loss is computed at a time."""
    sizes: Sequence[int]
    """Legal micro-batches; they follow from the global batch and the number of ranks."""
    world_size: int
    """Ranks."""
    ranks_here: int
    """Ranks of a host."""
    sharded: bool
    """Whether ranks share out the optimizer's state."""
    threads: int
    """Intra-op threads of a rank."""
    device: str
    """Name of the accelerator, or cpu."""
    cpu: str
    """Name of the processor."""
    cores: int
    """Of the host."""
    torch: str
    """Version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A micro-batch that ran."""

    size: int
    """Sequences of a leaf."""
    peak_bytes: int
    """What it took, on the rank with the least room."""
    limit_bytes: int
    """What that rank might have taken."""
    date: str
    """Of the measurement."""

    def holds(self, limit_bytes: int) -> bool:
        """Whether it is still the answer where a rank may take `limit_bytes`."""
        least, most = (int(share * self.limit_bytes) for share in _SAME_ROOM)
        return self.peak_bytes <= limit_bytes and least <= limit_bytes <= most


def probed_path(conditions: ProbeConditions) -> Path:
    """Where the answer for `conditions` is kept.

    Raises:
        ConfigError: there is no home to keep a cache in.
    """
    digest = hashlib.sha256(_key(conditions).encode()).hexdigest()[:16]
    return environ.cache_dir() / "micro-batch" / f"{digest}.json"


def save_probed(conditions: ProbeConditions, probed: Probed) -> Path:
    """Keep `probed`.

    Raises:
        RunError: the cache cannot be written.
    """
    path = probed_path(conditions)
    document = {
        "format_version": FORMAT_VERSION,
        "conditions": asdict(conditions),
        **asdict(probed),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(document))
    except OSError as error:
        raise RunError(
            f"could not write {path}: {error.strerror}; GRADSYNC_CACHE can name another cache"
        ) from error
    return path


def read_probed(conditions: ProbeConditions) -> Probed | None:
    """What was kept for `conditions`; None when nothing was, or nothing that can be believed: it is
    measured again then, and replaced."""
    try:
        document = read_json(probed_path(conditions))
        if document["format_version"] != FORMAT_VERSION:
            return None
        if json.dumps(document["conditions"], sort_keys=True) != _key(conditions):
            return None
        numbers = {name: document[name] for name in ("size", "peak_bytes", "limit_bytes")}
        if any(type(number) is not int or number < 1 for number in numbers.values()):
            return None
        if numbers["size"] not in conditions.sizes or not document["date"].isprintable():
            return None
        return Probed(**numbers, date=document["date"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _key(conditions: ProbeConditions) -> str:
    return json.dumps(asdict(conditions), sort_keys=True)
