"""One run as one rank sees it, and what it has to be held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradsync.verify.exact import Exact, add_up
from gradsync.verify.promise import Promise
from gradsync.verify.reference import LeafResult, Reference
from gradsync.verify.saved import Saved
from gradsync.verify.trace import Trace

Documents = list[list[dict[str, Any]]]
"""Digests of every rank's steps: [rank][step], see `digests_of`."""


@dataclass(kw_only=True, slots=True)
class Evidence:
    """One run, as one rank sees it."""

    rank: int
    promise: Promise
    reference: Reference
    trace: Trace
    ranks: Documents
    start: Saved | None = None
    """The checkpoint that the run must start from; None: the reference's initial weights."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def own_leaves(evidence: Evidence, number: int) -> set[int]:
    """Indices of the leaves whose sum this rank's gradient must be."""
    if not evidence.promise.local:
        return {leaf.index for leaf in evidence.reference.traces[number]}
    place = _place(evidence, number)
    return {leaf["index"] for leaf in evidence.ranks[evidence.rank][place]["leaves"]}


def exact_of(evidence: Evidence, place: int) -> Exact:
    """What this rank's gradient of a step must be, at the weights that the run had."""
    mine = own_leaves(evidence, evidence.trace.steps[place].number)
    return add_up([r for r in leaf_results(evidence, place) if r.index in mine])


def leaf_results(evidence: Evidence, place: int) -> list[LeafResult]:
    """Every leaf of a step on its own, at the weights that the run had."""
    trace, step = evidence.trace, evidence.trace.steps[place]
    buffers = trace.start_buffers if place == 0 else trace.steps[place - 1].buffers
    return evidence.reference.leaf_results(step.number, step.before, buffers)


def _place(evidence: Evidence, number: int) -> int:
    return next(p for p, step in enumerate(evidence.trace.steps) if step.number == number)
