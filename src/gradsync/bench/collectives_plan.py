"""The request to `bench collectives`: operations, algorithms, sizes. Pure; no torch.

Sizes are nccl-tests': bytes of the whole tensor, that is of the input of all_reduce, broadcast and
reduce_scatter, and of the output of all_gather.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from gradsync.errors import ConfigError

OPERATIONS = {
    "all_reduce": (
        *("backend", "ring", "recursive_doubling", "hierarchical", "tree"),
        *("shared", "shared_copies"),
    ),
    "reduce_scatter": ("backend", "ring", "shared", "shared_copies"),
    "all_gather": ("backend", "ring", "shared", "shared_copies"),
    "broadcast": ("backend", "tree", "shared", "shared_copies"),
}
"""Algorithms of each operation. `backend` is the process group's own, `shared` goes through shared
memory over buffers that lie there, `shared_copies` over ordinary ones."""

ALGORITHMS = tuple(dict.fromkeys(name for names in OPERATIONS.values() for name in names))

COPY = "copy"
"""The yardstick that runs beside the algorithms: each rank copies on its own."""

DTYPES = {
    **{"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
    **{"int64": "int64", "int32": "int32", "int8": "int8"},
}
"""Names for users, and torch's."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int8": 1}

_SMALLEST = 4
_LARGEST = 2**30
_BUFFERS = 7
"""The most buffers of the tensor's size that a rank holds: two ordinary ones, two in shared memory,
one in which an algorithm receives, and as much again inside a backend."""
_SPARE = 0.9
"""Part of the free memory that may be taken."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The request, as every rank is told it."""

    operations: tuple[str, ...]
    """Names in `OPERATIONS`."""
    algorithms: tuple[str, ...]
    """Names in `ALGORITHMS`."""
    sizes: tuple[int, ...]
    """Bytes; none for the default ones."""
    max_bytes: int
    """Largest of the default sizes."""
    dtype: str
    """A name in `DTYPES`."""
    device: str
    """auto, cpu or cuda."""
    threads: int | None
    """Intra-op threads of a rank; None for cores / ranks."""
    rounds: int
    """Turns of each algorithm at each size, at most."""
    burst: int
    """Operations that follow each other in one repetition, which counts as their mean."""
    seconds_per_point: float
    """Time for one algorithm at one size, about; slow ones take longer."""

    def algorithms_of(self, operation: str) -> list[str]:
        """The algorithms asked for that the operation has."""
        return [name for name in OPERATIONS[operation] if name in self.algorithms]


def check_settings(settings: Settings) -> Settings:
    """`settings`, if they can be.

    Raises:
        ConfigError: an unknown name, a number out of range, nothing to measure.
    """
    _check_names("operation", settings.operations, OPERATIONS)
    _check_names("algorithm", settings.algorithms, ALGORITHMS)
    _check_names("dtype", [settings.dtype], DTYPES)
    _check_names("device", [settings.device], ("auto", "cpu", "cuda"))
    if not any(settings.algorithms_of(operation) for operation in settings.operations):
        raise ConfigError(
            f"nothing to measure: {', '.join(settings.operations)} by "
            f"{', '.join(settings.algorithms)} does not exist"
        )
    for name in ("rounds", "burst", "threads"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    seconds = settings.seconds_per_point
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"--seconds-per-point {seconds}: must be a finite number, at least 0")
    return settings


def _check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    if not names:
        raise ConfigError(f"no {what} given (there are: {', '.join(known)})")
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; perhaps you meant {near[0]!r}" if near else ""
            raise ConfigError(f"unknown {what} {name!r}{hint} (there are: {', '.join(known)})")


def parse_size(option: str, text: str) -> int:
    """Bytes from `4`, `4B`, `64K`, `25M`, `25MiB` (powers of 1024) or `25MB` (of 1000).

    Raises:
        ConfigError: any other text, or less than one byte.
    """
    pattern = r"([0-9]{1,19}(?:\.[0-9]+)?) ?([KMG]?)(iB|B|)"
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"{option}: {text[:80]!r} is no size; write bytes, or a number with K, M or G: 64K"
        )
    number, unit, suffix = found[1], found[2].upper(), found[3].lower()
    factor = _UNITS[unit]
    if suffix == "b" and unit:
        factor = 1000 ** (list(_UNITS).index(unit))
    size = int(float(number) * factor)
    if size < 1:
        raise ConfigError(f"{option}: {text!r} is less than one byte")
    return size


def size_text(size_bytes: int) -> str:
    """Short, exact: `4 B`, `64 KiB`, `25 MiB`; plain bytes where that does not come out even."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            even = size_bytes % (factor // 4) == 0
            return f"{size_bytes / factor:g} {unit}" if even else f"{size_bytes} B"
    return f"{size_bytes} B"


def needed_bytes(size_bytes: int, ranks: int) -> int:
    """Memory that `ranks` ranks take together to measure one size."""
    return _BUFFERS * size_bytes * ranks


def choose_sizes(settings: Settings, *, available_bytes: int, ranks: int) -> list[int]:
    """Sizes in ascending order: those asked for, or 4 B, 16 B, 64 B, ... as far as memory goes.

    Args:
        settings: with or without sizes.
        available_bytes: free memory.
        ranks: how many share it.

    Raises:
        ConfigError: a size that was asked for needs more than there is.
    """
    usable = int(_SPARE * available_bytes)
    if settings.sizes:
        largest = max(settings.sizes)
        if needed_bytes(largest, ranks) > usable:
            raise ConfigError(
                f"--sizes: {size_text(largest)} takes {needed_bytes(largest, ranks) / 2**30:.1f} "
                f"GiB for {ranks} rank(s), and {usable / 2**30:.1f} GiB may be taken here; the "
                f"largest size is {usable // needed_bytes(1, ranks)} bytes"
            )
        return sorted(set(settings.sizes))
    sizes, size = [], _SMALLEST
    while size <= settings.max_bytes and needed_bytes(size, ranks) <= usable:
        sizes.append(size)
        size *= 4
    if not sizes:
        raise ConfigError(f"--max-bytes {settings.max_bytes}: the smallest size is {_SMALLEST}")
    return sizes


def counts_of(operation: str, sizes: Sequence[int], dtype: str, world_size: int) -> list[int]:
    """Elements of the whole tensor for each size, without repetition.

    Rounded down to whole elements, and up to whole parts where each rank has a part of its own.
    """
    counts = [max(size // ITEM_BYTES[dtype], 1) for size in sizes]
    if operation in ("reduce_scatter", "all_gather"):
        counts = [math.ceil(count / world_size) * world_size for count in counts]
    return list(dict.fromkeys(counts))


def repetitions_of(seconds: float, settings: Settings, overhead_s: float) -> int:
    """How often one turn repeats an operation that takes `seconds`."""
    turn_s = settings.seconds_per_point / settings.rounds
    return max(1, min(int(turn_s / (seconds + overhead_s)), 50))


def rounds_of(seconds: Sequence[float], settings: Settings) -> int:
    """How many rounds for algorithms that take `seconds` each: fewer where they are slow, but at
    least three (unless fewer were asked for)."""
    affordable = int(settings.seconds_per_point * len(seconds) / sum(seconds))
    return max(min(3, settings.rounds), min(affordable, settings.rounds))
