"""What was found to differ, and what it comes from: values without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Where in a step the first difference shows, in the order in which they are looked for."""

    START = "initial weights"
    DATA = "data"
    RANDOM = "random state"
    FINITE = "not finite"
    FORWARD = "forward"
    MOVED = "weights changed during backward"
    GRADIENT_REPLICAS = "gradients differ between ranks"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    LOSS = "loss"
    UPDATE = "update"
    REPLICAS = "weights differ between ranks"
    MEETING = "averaged weights"
    BUFFERS = "buffers"
    BITS = "bits"
    FALL = "loss does not fall"


class Cause(StrEnum):
    """The closed list of reasons."""

    DATA = "data"
    INITIAL_WEIGHTS = "initial weights"
    LOSS_SCALING = "loss scaling"
    UNSYNCHRONISED = "unsynchronised parameter"
    FLAG_TOO_LATE = "synchronisation flag set too late"
    BATCH_NORM = "BatchNorm"
    RANDOM = "dropout/RNG"
    DTYPE = "dtype"
    ORDER = "order only"
    OPTIMIZER = "optimizer step"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The first difference of one kind in one step."""

    kind: Kind
    step: int
    names: tuple[str, ...] = ()
    """Parameters (or buffers), first in the model's order."""
    ranks: tuple[int, ...] = ()
    """Ranks that deviate; empty when all do alike."""
    detail: str = ""
    """Numbers, for the sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why a cell failed."""

    cause: Cause
    sentence: str
    """One sentence: what, first step, parameter, ranks, cause, what to do."""
    step: int
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    tried: tuple[str, ...] = field(default=())
    """Variants that were run, and whether the difference was still there."""


def minority(values: list[str]) -> tuple[int, ...]:
    """Ranks whose value is not the most frequent one (of equally frequent ones, rank 0's or the
    lowest rank's counts as right)."""
    if len(set(values)) <= 1:
        return ()
    best = max(dict.fromkeys(values), key=values.count)
    return tuple(rank for rank, value in enumerate(values) if value != best)


def listed(names: tuple[str, ...], most: int = 3) -> str:
    """`'a', 'b', 'c' and 4 more`."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1` or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """As a JSON object."""
    return asdict(finding)


def finding_from_json(data: dict[str, Any]) -> Finding:
    """What `finding_to_json` wrote."""
    return Finding(
        kind=Kind(data["kind"]),
        step=data["step"],
        names=tuple(data["names"]),
        ranks=tuple(data["ranks"]),
        detail=data["detail"],
    )
