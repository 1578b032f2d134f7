"""Findings, their causes, and the result of a cell, as values and as sentences. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Places of the first difference in a step, in the order in which they are looked for."""

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
    """The first difference of one kind in one step; made of what JSON can write."""

    kind: Kind
    step: int
    names: Sequence[str] = ()
    """Parameters (or buffers), first in the model's order."""
    ranks: Sequence[int] = ()
    """Ranks that deviate; empty when all do alike."""
    detail: str = ""
    """Numbers, for the sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The cause of a failure; field by field as in `Result`."""

    cause: str
    sentence: str
    step: int
    names: list[str]
    ranks: list[int]
    tried: list[str]


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
    """A lossy strategy's promise."""
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
    """Digest of the final parameters."""
    cause: str = ""
    """From the closed list; "" when passed."""
    sentence: str = ""
    """One sentence: the difference, its place, its cause, and what to do."""
    step: int | None = None
    """First step that is not as promised."""
    names: list[str] = field(default_factory=list)
    """Parameters that differ there."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that deviate, or that failed; empty when all do alike, or it is not known."""
    tried: list[str] = field(default_factory=list)
    """Variants that were run to find the cause, and whether the difference was still there."""
    seconds: float = 0.0
    """Time that the cell took."""

    @property
    def passed(self) -> bool:
        """Whether it is as promised."""
        return self.status == "passed"

    @property
    def name(self) -> str:
        """The result in a line of text."""
        loaded = f" from {self.loaded_from}" if self.loaded_from else ""
        return f"{self.strategy} W={self.world_size} {self.model} {self.dtype}{loaded}"


def minority(values: list[str]) -> tuple[int, ...]:
    """Ranks whose value is not the most frequent one (of equally frequent ones, rank 0's or the
    lowest rank's counts as right)."""
    best = max(dict.fromkeys(values), key=values.count)
    return tuple(rank for rank, value in enumerate(values) if value != best)


def listed(names: Sequence[str], most: int = 3) -> str:
    """`'a', 'b', 'c' and 4 more`."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_FINDINGS = {
    Kind.START: "the weights are not the one-rank run's",
    Kind.DATA: "the global batch is not the one-rank run's",
    Kind.RANDOM: "dropout is not the one-rank run's",
    Kind.FINITE: "a number is not finite on one rank either",
    Kind.FORWARD: "the forward is not reproducible",
    Kind.MOVED: "weights changed during backward",
    Kind.GRADIENT_REPLICAS: "the gradient differs between ranks",
    Kind.GRADIENT: "the gradient is not the one-rank run's",
    Kind.NORM: "the gradient norm is not the one-rank run's",
    Kind.LOSS: "the mean loss is not the one-rank run's",
    Kind.UPDATE: "the optimizer's step is not the one-rank run's",
    Kind.REPLICAS: "the weights differ between ranks",
    Kind.MEETING: "the weights are not what the ranks' meeting must give",
    Kind.BUFFERS: "buffers are not the one-rank run's",
    Kind.BITS: "the bits are not the one-rank run's",
    Kind.FALL: "the loss does not fall",
}

_ADVICE = {
    Cause.DATA: "Give each sample of a global batch to exactly one rank (gs.loader does).",
    Cause.INITIAL_WEIGHTS: "Broadcast rank 0's weights before the first step (gs.replicate does).",
    Cause.LOSS_SCALING: "Sum losses over targets and divide once, by the global number of targets.",
    Cause.UNSYNCHRONISED: "Let every rank reduce every gradient in every step, in the same order.",
    Cause.FLAG_TOO_LATE: "Enter micro_step or no_sync before the forward, not before the backward.",
    Cause.BATCH_NORM: "Choose batch_norm=freeze, or use GroupNorm.",
    Cause.RANDOM: "Seed by (seed, step, leaf) before each forward, never by rank.",
    Cause.DTYPE: "Keep gradients in the weights' dtype, or choose a strategy that says it rounds.",
    Cause.ORDER: "All is right up to rounding; sums are taken in another order at this world size.",
    Cause.OPTIMIZER: "The optimizer must act elementwise on the whole mean gradient.",
    Cause.UNKNOWN: "None of the known causes explains it; compare the first parameter by hand.",
}

_ADVICE_ON_FINDING = {
    Kind.FINITE: "Look for its first inf or nan on one rank: no strategy can help.",
    Kind.FORWARD: "Let it depend on inputs, weights, buffers and torch's generator alone.",
    Kind.REPLICAS: "Let nothing but the optimizer write to weights, alike on all ranks.",
    Kind.MEETING: "Average the weights of all ranks, with equal shares.",
    Kind.BUFFERS: "Leave buffers to gs.replicate, which moves them by what all leaves do.",
    Kind.MOVED: "Reduce parameter.grad in the hook, and leave the parameter alone.",
}


def sentence(cause: Cause, finding: Finding, detail: str) -> str:
    """`step 2, 'head.weight', rank 1: finding; cause: why. Advice.`"""
    where = [f"step {finding.step}"]
    if finding.names:
        where.append(listed(finding.names))
    if finding.ranks:
        where.append(ranks_text(finding.ranks))
    advice = _ADVICE[cause]
    named = finding.kind in (Kind.FINITE, Kind.FORWARD)
    if named or cause in (Cause.UNSYNCHRONISED, Cause.BATCH_NORM):
        advice = _ADVICE_ON_FINDING.get(finding.kind, advice)
    why = f"{cause}: {detail}" if detail else cause
    return f"{', '.join(where)}: {_FINDINGS[finding.kind]}; {why}. {advice}"
