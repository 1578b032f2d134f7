"""Bytes that one rank needs at its fullest moment, part by part; pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """The sum of closed formulas; each field's formula and source stand in `memory/model.py`."""

    weights: int
    gradients: int
    optimizer: int
    """The optimizer's state."""
    buckets: int
    """Copies of gradients made for communication, gathered blocks and windows of a strategy."""
    activations: int
    """What forward keeps for backward, at the fullest moment of the schedule."""
    logits: int
    """The head's output and what the loss makes of it."""
    workspace: int
    """Temporary buffers beside these."""
    slack: int
    """What the allocator holds without using it."""
    process: int
    """The interpreter, torch, the CUDA context, communication buffers."""

    @property
    def total(self) -> int:
        """Of one rank."""
        return sum(getattr(self, f.name) for f in fields(self))
