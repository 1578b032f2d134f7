"""What each strategy promises about its numbers, so that it is held to that and to nothing less.

    bitwise    the bits of its own run on one rank, at every world size
    rounding   one rank's result, up to the order in which numbers are added
    lossy      something else by design, said in `says`; replicas equal, and the loss falls

No torch here. `bitwise` includes `rounding`: equal bits that are wrong everywhere would not help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsync.sync.registry import Promise as Kind
from gradsync.sync.registry import find_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What one strategy is held to."""

    kind: Kind = "rounding"
    """As its entry in the registry says."""
    wire: str = ""
    """bf16 or fp16 when gradients travel in it: that dtype's rounding is allowed, once per sum."""
    bounded: bool = True
    """False when no bound on the gradient follows from arithmetic (low rank)."""
    local: bool = False
    """True when gradients stay each rank's own and weights are averaged instead."""
    zeros_when_unused: bool = False
    """True when a parameter that no rank used has a gradient of zeros instead of none (torch's
    DDP; weight decay and momentum then still move it)."""
    equal_leaves: bool = False
    """True when every rank must have equally many leaves in every step."""
    says: str = ""
    """What a lossy one promises, in a few words."""


_DETAILS: dict[str, Promise] = {
    "ddp": Promise(zeros_when_unused=True),
    "fsdp": Promise(equal_leaves=True),
    "powersgd": Promise(
        bounded=False,
        zeros_when_unused=True,
        says="gradients of low rank; replicas equal, loss falls",
    ),
    "local_sgd": Promise(local=True, says="ranks step alone; weights averaged when they meet"),
    "diloco": Promise(local=True, says="ranks step alone; one outer step when they meet"),
}


def promise_of(strategy: str) -> Promise:
    """What `strategy` is held to.

    Raises:
        ConfigError: no such strategy.
    """
    entry = find_strategy(strategy)
    wire = "" if entry.recipe is None or entry.recipe.wire == "same" else entry.recipe.wire
    details = _DETAILS.get(strategy, Promise(says=f"{wire} on the wire" if wire else ""))
    return replace(details, kind=entry.promise, wire=wire)
