"""What verify says of one cell, for tables and files. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Result:
    """One cell, or one checkpoint handed from one cell to another."""

    strategy: str
    world_size: int
    model: str
    dtype: str
    promise: str
    """bitwise, rounding or lossy."""
    says: str = ""
    """What a lossy strategy promises."""
    loaded_from: str = ""
    """Name of the cell whose checkpoint this run continued; "" for a run from the start."""
    status: str = "passed"
    """passed, failed or error."""
    bitwise: bool = False
    """Losses, gradients, weights and optimizer state have the bits of the one-rank run: of the
    strategy's own for `bitwise` ones, of plain PyTorch's for the others."""
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)
    """loss, gradient, weight and state of the free runs: `max_abs`, `max_rel`, `max_ulp`,
    `bitwise`, `first_step`, `first_name`."""
    part_of_bound: float = 0.0
    """Largest error of a gradient over its bound; above 1 it cannot be rounding."""
    losses: list[float] = field(default_factory=list)
    """Global mean loss of each step."""
    weights_sha256: str = ""
    """Of the final parameters."""
    cause: str = ""
    """From the closed list; "" when passed."""
    sentence: str = ""
    """What differs, where, why, and what to do."""
    step: int | None = None
    """First step that is not as promised."""
    names: list[str] = field(default_factory=list)
    """Parameters that differ there."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that deviate, or that failed; empty when all do alike, or it is not known."""
    tried: list[str] = field(default_factory=list)
    """Variants that were run to find the cause."""
    seconds: float = 0.0
    """How long the cell took."""

    @property
    def passed(self) -> bool:
        """As promised."""
        return self.status == "passed"

    @property
    def name(self) -> str:
        """For people."""
        loaded = f" from {self.loaded_from}" if self.loaded_from else ""
        return f"{self.strategy} W={self.world_size} {self.model} {self.dtype}{loaded}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def result_from_json(data: dict[str, Any]) -> Result:
    """What `Result.to_json` wrote."""
    return Result(**data)
