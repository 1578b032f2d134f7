"""Holds one run against the one-rank reference, step by step, and stops at the first difference.

See [Note: Bounds] in tolerance.py for what is compared with what.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.verify.aftermath import check_buffers, check_update
from gradsync.verify.evidence import Evidence, exact_of
from gradsync.verify.exact import (
    DTYPE_NAMES,
    Exact,
    clip_factor,
    gradient_bounds,
    norm_bound,
    part_of_bound,
)
from gradsync.verify.finding import Finding, Kind, minority
from gradsync.verify.promise import Promise
from gradsync.verify.saved import Saved
from gradsync.verify.trace import StepTrace, digest

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(slots=True)
class Verdict:
    """What was found in the first step that is not as promised; empty when all are."""

    findings: list[Finding] = field(default_factory=list)
    part_of_bound: float = 0.0
    """Largest share of a gradient's bound that was used."""

    @property
    def passed(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def first(self, *kinds: Kind) -> Finding | None:
        """The first finding of one of these kinds."""
        return next((f for f in self.findings if f.kind in kinds), None)


def judge(evidence: Evidence) -> Verdict:
    """Check every step until one is not as promised; later ones would only show what follows."""
    verdict = Verdict()
    for place, step in enumerate(evidence.trace.steps):
        if place == 0:
            verdict.findings += _start(evidence, step)
        documents = [rank[place] for rank in evidence.ranks]
        verdict.findings += _data(evidence, step.number, documents)
        verdict.findings += _random(evidence, step.number, documents)
        verdict.findings += _moved(step, documents)
        if not evidence.promise.local:
            verdict.findings += _replicas(step, documents, "gradient", Kind.GRADIENT_REPLICAS)
        verdict.findings += _gradient(evidence, place, verdict)
        verdict.findings += check_update(evidence, place)
        if not evidence.promise.local:
            verdict.findings += _replicas(step, documents, "after", Kind.REPLICAS)
            verdict.findings += _replicas(step, documents, "buffers", Kind.BUFFERS)
        verdict.findings += check_buffers(evidence, place)
        if verdict.findings:
            break
    return verdict


def _start(evidence: Evidence, step: StepTrace) -> list[Finding]:
    saved = evidence.start
    expected = evidence.reference.start() if saved is None else saved.weights
    wanted = {name: digest(tensor) for name, tensor in expected.items()}
    wrong: list[str] = []
    ranks: set[int] = set()
    for rank, steps in enumerate(evidence.ranks):
        for name, found in steps[0]["before"].items():
            if found != wanted[name]:
                wrong.append(name)
                ranks.add(rank)
    detail = ""
    if saved is not None and (lost := _lost_state(evidence, saved)):
        wrong += lost
        detail = "the optimizer's state is not the checkpoint's"
    if not wrong:
        return []
    names = tuple(name for name in wanted if name in wrong)
    where = tuple(sorted(ranks))
    return [Finding(kind=Kind.START, step=step.number, names=names, ranks=where, detail=detail)]


def _lost_state(evidence: Evidence, saved: Saved) -> list[str]:
    """Parameters whose optimizer state did not come back with its bits."""
    got, wanted = evidence.trace.start_state[0], saved.optimizer[0]
    keys = [key for key in {**wanted, **got} if digest(got.get(key)) != digest(wanted.get(key))]
    return [key.partition("/")[2] for key in keys]


def _data(evidence: Evidence, number: int, documents: list[dict[str, Any]]) -> list[Finding]:
    """Each sample of the global batch exactly once, on whatever rank."""
    expected = evidence.reference.traces[number]
    wanted = Counter(sample for leaf in expected for sample in leaf.samples)
    trained = [leaf for document in documents for leaf in document["leaves"]]
    seen = Counter(sample for leaf in trained for sample in leaf["samples"])
    if wanted == seen:
        return []
    home = evidence.reference.owner_of
    missing, extra = wanted - seen, seen - wanted
    parts = []
    if missing:
        parts.append(f"missing: {_samples(missing, home)}")
    if extra:
        parts.append(f"too often: {_samples(extra, home)}")
    ranks = tuple(
        rank
        for rank, document in enumerate(documents)
        if any(sample in extra for leaf in document["leaves"] for sample in leaf["samples"])
    )
    return [Finding(kind=Kind.DATA, step=number, ranks=ranks, detail="; ".join(parts))]


def _samples(counter: Counter[str], home: dict[str, int]) -> str:
    names = [f"sample {home[sample]}" for sample in counter.elements() if sample in home]
    shown = ", ".join(names[:4])
    if len(names) > 4:
        shown = f"{shown} and {len(names) - 4} more"
    unknown = counter.total() - len(names)
    strangers = f"{unknown} not in the data set as rank 0 reads it"
    return ", ".join(([shown] if names else []) + ([strangers] if unknown else []))


def _random(evidence: Evidence, number: int, documents: list[dict[str, Any]]) -> list[Finding]:
    """The state that dropout draws from belongs to (step, leaf), not to a rank."""
    wanted = {leaf.index: leaf.random for leaf in evidence.reference.traces[number]}
    wrong = [
        (rank, leaf["index"])
        for rank, document in enumerate(documents)
        for leaf in document["leaves"]
        if leaf["index"] in wanted and leaf["random"] != wanted[leaf["index"]]
    ]
    if not wrong:
        return []
    ranks = tuple(sorted({rank for rank, _ in wrong}))
    detail = f"leaf {wrong[0][1]} on rank {wrong[0][0]}"
    return [Finding(kind=Kind.RANDOM, step=number, ranks=ranks, detail=detail)]


def _moved(step: StepTrace, documents: list[dict[str, Any]]) -> list[Finding]:
    names: list[str] = []
    ranks = []
    for rank, document in enumerate(documents):
        before, at_step = document["before"], document["at_step"]
        if moved := [name for name in at_step if at_step[name] != before[name]]:
            names += moved
            ranks.append(rank)
    if not ranks:
        return []
    return [
        Finding(
            kind=Kind.MOVED,
            step=step.number,
            names=tuple(dict.fromkeys(names)),
            ranks=tuple(ranks),
        )
    ]


def _replicas(
    step: StepTrace, documents: list[dict[str, Any]], part: str, kind: Kind
) -> list[Finding]:
    names, ranks = [], set()
    for name in documents[0][part]:
        values = [document[part].get(name, "") for document in documents]
        if deviating := minority(values):
            names.append(name)
            ranks.update(deviating)
    if not names:
        return []
    return [Finding(kind=kind, step=step.number, names=tuple(names), ranks=tuple(sorted(ranks)))]


def _gradient(evidence: Evidence, place: int, verdict: Verdict) -> list[Finding]:
    step = evidence.trace.steps[place]
    exact = exact_of(evidence, place)
    if exact.weight and (finding := _not_finite(step, exact)):
        return [finding]
    findings = [] if evidence.promise.local or not exact.weight else _loss(step, exact)
    if not evidence.promise.bounded or not exact.weight:
        return findings
    settings = evidence.reference.settings
    clipped = settings.clip_norm is not None
    bounds = gradient_bounds(exact, evidence.promise, evidence.world_size, clipped=clipped)
    factor = clip_factor(step.norm, settings.clip_norm)
    parts = {}
    for name in evidence.trace.trainable:
        got = step.gradient.get(name)
        if name not in exact.total or got is None:
            parts[name] = _unused(got, name in exact.total, evidence.promise)
        else:
            bound = bounds[name] * max(factor, 1e-30)
            parts[name] = part_of_bound(got, exact.mean(name) * factor, bound)
    verdict.part_of_bound = max(verdict.part_of_bound, *parts.values())
    wrong = tuple(name for name, part in parts.items() if part > 1)
    if wrong:
        detail = f"{parts[wrong[0]]:.3g} times the bound"
        findings.append(Finding(kind=Kind.GRADIENT, step=step.number, names=wrong, detail=detail))
    if step.norm is not None and abs(step.norm - exact.norm()) > norm_bound(exact, bounds):
        detail = f"{step.norm:.9g}, expected {exact.norm():.9g}"
        findings.append(Finding(kind=Kind.NORM, step=step.number, detail=detail))
    return findings


def _not_finite(step: StepTrace, exact: Exact) -> Finding | None:
    """What one rank cannot compute either: no bound applies, and no strategy is to blame."""
    names = tuple(name for name, total in exact.total.items() if not bool(total.isfinite().all()))
    detail = ""
    if not math.isfinite(exact.loss):
        detail = f"the loss is {exact.loss}"
    elif names:
        detail = "the loss is finite, its gradient is not"
    elif step.norm is not None and not math.isfinite(step.norm):
        # As torch's clipping takes it, in the dtype of the gradients.
        grads = [exact.mean(name).to(_DTYPES[exact.dtype[name]]) for name in exact.total]
        if not bool(torch.nn.utils.get_total_norm(grads).isfinite()):
            detail = f"the gradient norm, {exact.norm():.3g}, overflows when it is squared"
    return (
        Finding(kind=Kind.FINITE, step=step.number, names=names, detail=detail) if detail else None
    )


def _unused(got: Tensor | None, used: bool, promise: Promise) -> float:
    """Part of the bound when one side has no gradient: none is right only where no leaf has."""
    if got is None:
        return float("inf") if used else 0.0
    zeros = promise.zeros_when_unused and not bool(got.any())
    return 0.0 if zeros else float("inf")


def _loss(step: StepTrace, exact: Exact) -> list[Finding]:
    if abs(step.loss - exact.loss) <= exact.loss_bound and step.weight == exact.weight:
        return []
    detail = f"{step.loss:.9g} over {step.weight:g} targets, expected {exact.loss:.9g} over "
    return [Finding(kind=Kind.LOSS, step=step.number, detail=detail + f"{exact.weight:g}")]
