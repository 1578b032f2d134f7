"""Findings, their causes, and the result of a cell: as values, sentences, a table and JSON.

No torch here.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from gradsync.commands.verify.settings import Cell, VerifySettings, promise_of


class Kind(StrEnum):
    """What can be found in a step: the first one of a step tells most about its cause."""

    START = "the weights are not the one-rank run's"
    DATA = "the global batch is not the one-rank run's"
    RANDOM = "dropout is not the one-rank run's"
    FINITE = "a number is not finite on one rank either"
    MOVED = "weights changed during backward"
    SCALED = "the gradient is a multiple of the one-rank run's"
    GRADIENT_REPLICAS = "the gradient differs between ranks"
    GRADIENT = "the gradient is not the one-rank run's"
    NORM = "the gradient norm is not the one-rank run's"
    LOSS = "the mean loss is not the one-rank run's"
    REPLICAS = "the weights differ between ranks"
    MEETING = "the weights are not what the ranks' meeting must give"
    BUFFERS = "buffers are not the one-rank run's"
    UPDATE = "the optimizer's step is not the one-rank run's"
    BITS = "the bits are not the one-rank run's"
    FALL = "the loss does not fall"


_SCALING = "Sum losses over targets and divide once, by the global number of targets."
_CAUSES = {
    Kind.START: (
        "initial weights",
        "Broadcast rank 0's weights before the first step (gs.replicate does).",
    ),
    Kind.DATA: ("data", "Give each sample of a global batch to exactly one rank (gs.loader does)."),
    Kind.RANDOM: (
        "dropout/RNG",
        "Seed by (seed, step, micro-batch) before each forward, never by rank.",
    ),
    Kind.FINITE: ("unknown", "Look for its first inf or nan on one rank: no strategy can help."),
    Kind.MOVED: (
        "unsynchronised parameter",
        "Reduce parameter.grad in a hook, and leave the parameter alone.",
    ),
    Kind.SCALED: ("loss scaling", _SCALING),
    Kind.GRADIENT_REPLICAS: (
        "unsynchronised parameter",
        "Let every rank reduce every gradient in every step; enter no_sync before the forward.",
    ),
    Kind.GRADIENT: (
        "unknown",
        "Look for random numbers drawn by rank, BatchNorm over one rank's samples, a micro-batch "
        "left out of the sum, or sums in a narrower dtype.",
    ),
    Kind.NORM: ("unknown", "Clip by the norm of the whole mean gradient, once."),
    Kind.LOSS: ("loss scaling", _SCALING),
    Kind.REPLICAS: (
        "unsynchronised parameter",
        "Let nothing but the optimizer write to weights, alike on all ranks.",
    ),
    Kind.MEETING: (
        "unsynchronised parameter",
        "Average the weights of all ranks, with equal shares.",
    ),
    Kind.BUFFERS: (
        "BatchNorm or other buffers",
        "Leave buffers to gs.replicate; for BatchNorm choose batch_norm=freeze, or use GroupNorm.",
    ),
    Kind.UPDATE: (
        "optimizer step",
        "The optimizer must act elementwise on the whole mean gradient.",
    ),
    Kind.BITS: (
        "order only",
        "All is right up to rounding; sums are taken in another order at this world size.",
    ),
    Kind.FALL: ("unknown", "Compare the first weights that differ from one rank's by hand."),
}
"""The likely cause of each, and advice."""
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The first difference of one kind in one step, in JSON types."""

    kind: Kind
    step: int
    names: Sequence[str] = ()  # parameters (or buffers), first in the model's order
    ranks: Sequence[int] = ()  # ranks that deviate; empty if all deviate alike
    detail: str = ""  # numbers for the sentence


@dataclass(kw_only=True, slots=True)
class Result(Cell):
    """The outcome of one cell of the matrix."""

    promise: str  # bitwise, rounding or lossy
    status: str = "passed"  # passed, failed or error
    bitwise: bool = False
    """Losses, gradients, weights and optimizer state have the bits of the one-rank run: the
    strategy's for `bitwise` ones, plain PyTorch's for the others."""
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)
    """loss, gradient, weight and state of the free runs, each with the fields of `Difference`."""
    part_of_bound: float = 0.0  # largest error of a gradient; above 1 it cannot be rounding
    losses: list[float] = field(default_factory=list)  # global mean loss of each step
    weights_sha256: str = ""  # digest of the final parameters
    cause: str = ""
    sentence: str = ""  # the difference, its place, its cause, and what to do
    step: int | None = None  # first step that breaks the promise
    names: list[str] = field(default_factory=list)  # parameters that differ there
    ranks: list[int] = field(default_factory=list)  # that deviate or failed; empty: all, or unknown

    @classmethod
    def of(cls, cell: Cell, **fields: Any) -> Result:
        """The result of `cell`, with `fields` in addition to its names and its promise."""
        return cls(**asdict(cell), promise=promise_of(cell.strategy).kind, **fields)

    @property
    def passed(self) -> bool:
        """Whether the promise holds."""
        return self.status == "passed"

    def explain(self, findings: Sequence[Finding]) -> None:
        """Record the finding that tells most, and the sentence that reports it:
        `step 2, 'head.weight', rank 1: finding (numbers); cause. Advice.`"""
        first = min(findings, key=lambda finding: [*Kind].index(finding.kind))
        self.status, self.step = "failed", first.step
        self.names, self.ranks = [*first.names], [*first.ranks]
        self.cause, advice = _CAUSES[first.kind]
        where = [f"step {self.step}", *map(repr, self.names[:_MOST_NAMES])]
        if left := self.names[_MOST_NAMES:]:
            where.append(f"{len(left)} more")
        if self.ranks:
            where.append(f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}")
        numbers = f" ({first.detail})" if first.detail else ""
        self.sentence = f"{', '.join(where)}: {first.kind}{numbers}; {self.cause}. {advice}"


def document(settings: VerifySettings, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """The document that `--json` prints; null stands for nan and infinity, which JSON lacks."""
    found = {
        "passed": all(result.passed for result in results),
        "settings": asdict(settings),
        "cells": [asdict(result) for result in results if not result.loaded_from],
        "cross_load": [asdict(result) for result in results if result.loaded_from],
        "seconds": round(seconds, 1),
    }
    return json.loads(json.dumps(found), parse_constant=lambda _: None)


_LEGEND = (
    "loss, gradient, weights: largest relative difference from one rank's run, over all steps; of "
    "bound: gradients' share of what rounding explains, against fp64 (docs/guide/verifying.md)"
)


def print_report(results: Sequence[Result], seconds: float, stream: TextIO) -> None:
    """A row per strategy and dtype, then each reason of failures once."""
    # A narrow terminal may wrap lines, because truncated words are unreadable. Messages of others
    # are printed unchanged: no markup in brackets, no pictures between colons.
    plain: Any = dict.fromkeys(("markup", "emoji", "highlight"), False)
    width = max(shutil.get_terminal_size().columns, 110)
    console = Console(file=stream, soft_wrap=True, width=width, **plain)
    cells = [result for result in results if not result.loaded_from]
    sizes = sorted({cell.world_size for cell in cells})
    table = Table(box=None, pad_edge=False)
    for name in ("strategy", "dtype", "promise", *(f"W={size}" for size in sizes)):
        table.add_column(name)
    for name in ("loss", "gradient", "weights", "of bound"):
        table.add_column(name, justify="right")
    for strategy, dtype in dict.fromkeys((cell.strategy, cell.dtype) for cell in cells):
        row = [cell for cell in cells if (cell.strategy, cell.dtype) == (strategy, dtype)]
        marks = [mark([cell for cell in row if cell.world_size == size]) for size in sizes]
        worst = [short(largest(row, part), 1) for part in ("loss", "gradient", "weight")]
        bound = max(cell.part_of_bound for cell in row)
        table.add_row(strategy, dtype, row[0].promise, *marks, *worst, f"{bound:.0%}")
    console.print(table)
    console.print(_LEGEND)
    reasons: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if not result.passed:
            reasons.setdefault((result.status, result.sentence), []).append(result)
    for alike in reasons.values():
        first, names = alike[0], ", ".join(result.name for result in alike)
        console.print(first.status, style="bold red", end=" ")
        if len(alike) == 1:
            console.print(f"{names}: {first.sentence}")
        else:
            console.print(f"{len(alike)} cells: {first.sentence}\n    {names}")
    failed = sum(not result.passed for result in results)
    console.print(
        f"{len(cells)} cells and {len(results) - len(cells)} checkpoints handed on, "
        f"{failed} failed, {seconds:.0f} s"
    )


def mark(cells: Sequence[Result]) -> str:
    """One word for some cells: the worst outcome among them."""
    for status in ("error", "failed"):
        if any(cell.status == status for cell in cells):
            return status
    if all(cell.bitwise for cell in cells):
        return "bitwise"
    return "lossy" if cells[0].promise == "lossy" else "rounding"


def largest(cells: Sequence[Result], part: str) -> float:
    """Largest relative difference of `part` from one rank's run; null in JSON was not a number."""
    found = [cell.differences[part]["max_rel"] for cell in cells if cell.differences]
    return max((math.inf if value is None else value for value in found), default=0.0)


def short(value: float, digits: int) -> str:
    """`0` or `3.1e-07`."""
    return "0" if value == 0 else f"{value:.{digits}e}"
