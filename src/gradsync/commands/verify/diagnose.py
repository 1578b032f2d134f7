"""Find why a run breaks its promise: a cause from the closed list, by evidence first.

    evidence          the record shows it (data, random state, start, a constant factor …)
    variants          the run is repeated with one thing changed; the change that makes the
                      difference vanish is the cause

A wrong gradient g is compared with candidates h that common mistakes would produce: g = c x h? With
c = <g, h> / <h, h> the rest |g - c h| / |g| is zero for the right candidate up to rounding, and of
order one for any other: a thousandth separates them in every summed dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradsync.commands.verify.compare import (
    Exact,
    add_up,
    clip_factor,
)
from gradsync.commands.verify.judge import Verdict
from gradsync.commands.verify.record import Tensors
from gradsync.commands.verify.reference import MicroBatchResult
from gradsync.commands.verify.result import Cause, Finding, Kind
from gradsync.commands.verify.settings import Variant

CLOSE = 1e-3  # largest relative rest of an explanation
_FAR = 1e-2  # a factor this close to one is no factor

Found = tuple[Cause, Finding, str]  # a cause, the finding it explains, and why


@dataclass(kw_only=True, slots=True)
class Scene:
    """The failing step on every rank."""

    verdict: Verdict
    results: Sequence[MicroBatchResult]
    documents: Sequence[Mapping[str, Any]]  # every rank's digests of the step
    gradients: list[Tensors]  # every rank's gradients of the step, clipped
    previous: list[Tensors]  # of the previous step; empty dicts in the first step
    dtype: str  # the cell's: fp64, fp32 or bf16
    has_batch_norm: bool
    passes: Callable[[Variant], bool]  # runs a variant of the cell: True if nothing was found
    local: bool = False  # ranks step alone: gradients have no common right value
    tried: list[str] = field(default_factory=list)  # variants, and whether the difference vanished
    exact: Exact = field(init=False)
    means: Tensors = field(init=False)  # the exact gradients

    def __post_init__(self) -> None:
        self.exact = add_up(self.results)
        self.means = self.exact.means()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.gradients)

    @property
    def owners(self) -> dict[int, int]:
        """Micro-batch -> rank that trained on it."""
        return {
            each["index"]: rank
            for rank, document in enumerate(self.documents)
            for each in document["micro_batches"]
        }

    def unclipped(self, rank: int) -> Tensors:
        """Gradients before clipping."""
        factor = clip_factor(self.documents[rank]["norm"])
        return {name: g.double() / factor for name, g in self.gradients[rank].items()}

    def far_apart(self, rank: int, other: Tensors) -> list[str]:
        """Parameters whose gradient on `rank` differs by more than any rounding, relative to the
        size of the summed terms."""
        got, found = self.unclipped(rank), []
        for name, magnitude in self.exact.magnitude.items():
            if name in got and name in other:
                size = float(magnitude.norm()) / self.exact.weight
                if size and float((got[name] - other[name]).norm()) / size > CLOSE:
                    found.append(name)
            elif name in got or name in other:
                found.append(name)
        return found

    def finding(self, **changes: Any) -> Finding:
        """The finding about gradients, with the ranks that deviate, if any."""
        first = self.verdict.first
        differ, wrong = first(Kind.GRADIENT_REPLICAS), first(Kind.GRADIENT)
        found = differ or wrong or first(Kind.NORM)
        if differ is not None and wrong is not None:
            both = {*differ.names, *wrong.names}
            names = [name for name in self.means if name in both]
            found = replace(wrong, names=names, ranks=differ.ranks)
        assert found is not None
        return replace(found, **changes)

    def vanishes(self, variant: Variant, text: str) -> bool:
        """Run a variant, and record whether the difference vanished."""
        gone = self.passes(variant)
        self.tried.append(f"{text}: {'gone' if gone else 'still there'}")
        return gone


def diagnose(scene: Scene) -> Found:
    """Find the cause; see the module's docstring."""
    found = _told(scene, _RECORDED)
    wrong = scene.verdict.first(Kind.GRADIENT, Kind.NORM, Kind.GRADIENT_REPLICAS)
    if found is None and wrong is not None:
        if not scene.local:
            found = _scaling(scene) or _micro_batch(scene) or _unsynchronised(scene)
        found = found or _by_variants(scene) or (Cause.UNKNOWN, wrong, wrong.detail)
    first = scene.verdict.findings[0]
    return found or _told(scene, _LATER) or (Cause.UNKNOWN, first, first.detail)


def _told(scene: Scene, known: Mapping[Kind, tuple[Cause, str]]) -> Found | None:
    """A cause that the kind of a finding tells; the kinds that come first tell most."""
    for kind, (cause, text) in known.items():
        if finding := scene.verdict.first(kind):
            is_norm = kind is Kind.BUFFERS and scene.has_batch_norm
            return Cause.BATCH_NORM if is_norm else cause, finding, text.format(finding.detail)
    return None


_RECORDED = {
    Kind.START: (Cause.INITIAL_WEIGHTS, "{}"),
    Kind.DATA: (Cause.DATA, "{}"),
    Kind.RANDOM: (Cause.RANDOM, "{} drew from another random state"),
    Kind.FINITE: (Cause.UNKNOWN, "{}"),
    Kind.BITS: (Cause.ORDER, "{}"),
    Kind.MOVED: (
        Cause.UNSYNCHRONISED,
        "the weights themselves changed between forward and optimizer, as when a hook acts on the "
        "parameter it is handed",
    ),
}
"""Before gradients are looked at."""
_LATER = {
    Kind.REPLICAS: (
        Cause.UNSYNCHRONISED,
        "its gradient was right and equal everywhere; something other than the optimizer wrote to "
        "it",
    ),
    Kind.MEETING: (Cause.UNSYNCHRONISED, "{}"),
    Kind.BUFFERS: (Cause.UNSYNCHRONISED, "each rank keeps its own, or another rule moves them"),
    Kind.UPDATE: (
        Cause.OPTIMIZER,
        "the same optimizer gives other weights from the same gradient on one rank",
    ),
    Kind.LOSS: (Cause.LOSS_SCALING, "gradients are right, the reported loss is {}"),
}
"""If gradients are right."""


def _scaling(scene: Scene) -> Found | None:
    """One constant over all parameters, different for each rank."""
    everyone = range(scene.world_size)
    wrong = {name for rank in everyone for name in scene.far_apart(rank, scene.means)}
    expected = {name: mean for name, mean in scene.means.items() if name in wrong}
    factors = [common_ratio(scene.unclipped(rank), expected) for rank in everyone]
    known = {r: f for r, f in enumerate(factors) if f is not None and abs(f - 1) > _FAR}
    if not known or any(f is None for f in factors):
        factor = common_ratio(scene.unclipped(0), _mean_of_means(scene))
        if wrong and factor is not None and abs(factor - 1) < CLOSE:
            text = "it is the mean of the ranks' own means, although they have unequal numbers of "
            return Cause.LOSS_SCALING, scene.finding(ranks=()), text + "targets"
        return None
    rank = min(known)
    text = name_of_factor(
        known[rank],
        world_size=scene.world_size,
        weight=scene.exact.weight,
        own_weight=sum(each["weight"] for each in scene.documents[rank]["micro_batches"]),
        num_micro_batches=len(scene.results),
    )
    ranks = () if len(known) == scene.world_size else tuple(known)
    where = f" (on rank {rank})" if scene.world_size > 1 else ""
    which = "every gradient" if len(expected) == len(scene.means) else "its gradient"
    finding = scene.finding(ranks=ranks, names=tuple(expected))
    return Cause.LOSS_SCALING, finding, f"{which} is the right one times {text}{where}"


def _mean_of_means(scene: Scene) -> Tensors:
    """Each rank's mean, averaged over ranks: right only if all ranks have the same weight."""
    owners = scene.owners
    found: Tensors = {}
    for rank in set(owners.values()):
        mine = add_up([r for r in scene.results if owners.get(r.index) == rank])
        for name, mean in mine.means().items() if mine.weight else ():
            share = mean / len(set(owners.values()))
            found[name] = found[name] + share if name in found else share
    return found


def _micro_batch(scene: Scene) -> Found | None:
    """A micro-batch that is missing from the sum, or counted twice."""
    got = scene.unclipped(0)
    for result in scene.results:
        for word, sign in (("missing", -1.0), ("twice", 1.0)):
            candidate = dict(scene.exact.total)
            for name, share in result.gradient.items():
                candidate[name] = candidate[name] + sign * share.double()
            candidate = {name: total for name, total in candidate.items() if bool(total.any())}
            if result.gradient and common_ratio(got, candidate) is not None:
                finding = scene.finding(ranks=(scene.owners.get(result.index, 0),))
                detail = f"the gradient of micro-batch {result.index} is {word} in the sum"
                return Cause.DATA, finding, detail
    return None


def _unsynchronised(scene: Scene) -> Found | None:
    """Parameters whose gradient is one rank's, the previous step's, or zero."""
    wrong = [scene.far_apart(rank, scene.means) for rank in range(scene.world_size)]
    names = [name for name in scene.means if any(name in each for each in wrong)]
    ranks = [rank for rank, each in enumerate(wrong) if each]
    if not names:
        return None
    finding = scene.finding(names=names, ranks=() if len(ranks) == scene.world_size else ranks)
    now, before = scene.gradients, scene.previous
    checks = {
        "its gradient is the previous step's (stale)": lambda rank, name: (
            name in now[rank]
            and name in before[rank]
            and ratio(now[rank][name], before[rank][name]) is not None
        ),
        "no gradient of it arrives": lambda rank, name: (
            name not in now[rank] or not bool(now[rank][name].any())
        ),
    }
    for text, explains in checks.items():
        if all(explains(rank, name) for rank in ranks for name in wrong[rank]):
            return Cause.UNSYNCHRONISED, finding, text
    one = scene.unclipped(0)
    differing = {n for rank in range(scene.world_size) for n in scene.far_apart(rank, one)}
    if not differing.issuperset(names):
        return None
    if len(names) < len(scene.means):
        return Cause.UNSYNCHRONISED, finding, "each rank keeps its own gradient of it"
    if max(len(document["micro_batches"]) for document in scene.documents) > 1:
        variant, text = Variant(one_micro_batch=True), "with one micro-batch a rank"
        if scene.vanishes(variant, f"{text}, no accumulation"):
            return Cause.FLAG_TOO_LATE, finding, f"{text} the difference is gone"
    return Cause.UNSYNCHRONISED, finding, "each rank keeps its own gradient of everything"


def _by_variants(scene: Scene) -> Found | None:
    """The variant that makes the difference vanish."""
    questions = [(Cause.RANDOM, Variant(dropout=False), "without dropout")]
    if scene.has_batch_norm:
        variant = Variant(frozen_batch_norm=True)
        questions.append((Cause.BATCH_NORM, variant, "with frozen BatchNorm statistics"))
    if scene.dtype == "bf16":
        questions.append((Cause.DTYPE, Variant(dtype="fp32"), "in fp32"))
    if scene.dtype != "fp64":
        questions.append((Cause.DTYPE, Variant(dtype="fp64"), "in fp64"))
    for cause, variant, text in questions:
        if scene.vanishes(variant, text):
            return cause, scene.finding(), f"{text} the difference is gone"
    return None


def ratio(got: Tensor, candidate: Tensor) -> float | None:
    """c if `got` = c x `candidate` up to `CLOSE`; None otherwise, or if one is all zeros."""
    g, h = got.double().reshape(-1), candidate.double().reshape(-1)
    size = float(h @ h)
    if not size or not bool(g.any()) or not bool(g.isfinite().all()):
        return None
    factor = float(g @ h) / size
    rest = float((g - factor * h).norm() / g.norm())
    return factor if rest < CLOSE and factor else None


def common_ratio(gradients: Tensors, candidates: Tensors) -> float | None:
    """One factor for all parameters together, or None."""
    if not candidates or any(name not in gradients for name in candidates):
        return None
    return ratio(
        torch.cat([gradients[name].double().reshape(-1) for name in candidates]),
        torch.cat([candidates[name].double().reshape(-1) for name in candidates]),
    )


def name_of_factor(
    factor: float, *, world_size: int, weight: float, own_weight: float, num_micro_batches: int
) -> str:
    """A wrong factor in words; the number itself if no known mistake gives it."""
    own = f"this rank's own {own_weight:g} targets"
    known = {
        f"{world_size}, the number of ranks: never divided by it": world_size,
        f"1/{world_size}: divided by the number of ranks once more": 1 / world_size,
        f"{weight:g}, the number of targets: a sum, not a mean": weight,
        f"1/{weight:g}: divided by the number of targets twice": 1 / weight,
        f"{num_micro_batches}, the number of micro-batches: not divided by it": num_micro_batches,
        f"1/{num_micro_batches}: divided by the number of micro-batches as well": (
            1 / num_micro_batches
        ),
    }
    if own_weight:
        share = weight / own_weight
        known[f"{weight:g}/{own_weight:g}: divided by {own} instead of all {weight:g}"] = share
        known[f"divided by {world_size} x {own}"] = share / world_size
    for text, value in known.items():
        if math.isclose(factor, value, rel_tol=CLOSE) and not math.isclose(value, 1.0):
            return text
    return f"{factor:.6g}"
