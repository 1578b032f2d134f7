"""Why a run is not as promised: a cause from the closed list, by evidence first.

    evidence          what was recorded says it (data, random state, start, a constant factor …)
    variants          the run is repeated with one thing changed; what makes the difference vanish
                      is the cause

`diagnose` is a generator: it yields the variants that it wants to see run, and is sent whether the
difference was gone. So it needs no ranks itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradsync.verify.exact import Exact, clip_factor
from gradsync.verify.explain import sentence
from gradsync.verify.finding import Cause, Diagnosis, Finding, Kind
from gradsync.verify.hypotheses import (
    CLOSE,
    common_ratio,
    is_mean_of,
    lost_or_double,
    mean_of_means,
    means,
    name_of_factor,
    ratio,
)
from gradsync.verify.judge import Verdict
from gradsync.verify.plan import PLAIN, Variant
from gradsync.verify.reference import LeafResult
from gradsync.verify.tolerance import SMALLEST_NORMAL, UNIT_ROUNDOFF

Steps = Generator[Variant, bool, Diagnosis]


@dataclass(kw_only=True, slots=True)
class Scene:
    """The failing step, with what every rank had there."""

    verdict: Verdict
    exact: Exact
    results: Sequence[LeafResult]
    documents: Sequence[Mapping[str, Any]]
    """Every rank's digests of the step."""
    gradients: list[dict[str, Tensor]]
    """Every rank's gradients of the step, clipped."""
    previous: list[dict[str, Tensor]]
    """Every rank's gradients of the step before it; empty dicts in the first step."""
    clip_norm: float | None
    dtype: str
    """Of the cell: fp64, fp32 or bf16."""
    has_batch_norm: bool
    local: bool = False
    """Ranks step alone: gradients have no common right value."""
    forward: tuple[Cause, Finding] | None = None
    """Why the same leaf does not give the same result again, or on every rank; None when it does.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.gradients)

    @property
    def owners(self) -> dict[int, int]:
        """Leaf -> rank that trained on it."""
        return {
            leaf["index"]: rank
            for rank, document in enumerate(self.documents)
            for leaf in document["leaves"]
        }

    def own_weight(self, rank: int) -> float:
        """Targets that `rank` had."""
        return sum(leaf["weight"] for leaf in self.documents[rank]["leaves"])

    def unclipped(self, rank: int) -> dict[str, Tensor]:
        """Gradients as they were before clipping."""
        factor = clip_factor(self.documents[rank]["norm"], self.clip_norm)
        return {name: g.double() / factor for name, g in self.gradients[rank].items()}

    def wrong(self, rank: int) -> tuple[str, ...]:
        """Parameters whose gradient on `rank` is off by more than any rounding."""
        got = self.unclipped(rank)
        return tuple(
            name
            for name in self.exact.total
            if name not in got or self._distance(name, got[name], self.exact.mean(name)) > CLOSE
        )

    def ranks_differ(self, names: Sequence[str]) -> bool:
        """Whether ranks have different gradients of all `names`, by more than any rounding."""
        got = [self.unclipped(rank) for rank in range(self.world_size)]
        return all(
            any(
                (name in each) != (name in got[0])
                or (name in each and self._distance(name, each[name], got[0][name]) > CLOSE)
                for each in got
            )
            for name in names
        )

    def _distance(self, name: str, a: Tensor, b: Tensor) -> float:
        """Of two gradients, relative to the size of what was added up."""
        size = float(self.exact.magnitude[name].norm()) / self.exact.weight
        return float((a - b).norm()) / size if size else 0.0


def diagnose(scene: Scene) -> Steps:
    """Find the cause; see the module's docstring."""
    tried: list[str] = []
    found = _recorded(scene)
    wrong = scene.verdict.first(Kind.GRADIENT, Kind.NORM, Kind.GRADIENT_REPLICAS)
    if found is None and wrong is not None:
        if not scene.local:
            found = _scaling(scene) or _leaf(scene) or (yield from _unsynchronised(scene, tried))
        if found is None:
            found = yield from _by_variants(scene, tried)
        found = found or _unexplained(wrong)
    if found is None:
        found = _after_the_gradient(scene)
    cause, finding, detail = found
    return Diagnosis(
        cause=cause,
        sentence=sentence(cause, finding, detail),
        step=finding.step,
        names=finding.names,
        ranks=finding.ranks,
        tried=tuple(tried),
    )


Found = tuple[Cause, Finding, str]


def _recorded(scene: Scene) -> Found | None:
    """What the run's own record already says, and what a leaf that was run again does."""
    first = scene.verdict.first
    if scene.forward and not first(Kind.START, Kind.DATA, Kind.RANDOM, Kind.FINITE):
        return *scene.forward, scene.forward[1].detail
    for kind, (cause, words) in _RECORDED.items():
        if finding := first(kind):
            return cause, finding, words.format(finding.detail)
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


def _scaling(scene: Scene) -> Found | None:
    """One constant over all parameters, on every rank its own."""
    finding = _gradient_finding(scene)
    wrong = {name for rank in range(scene.world_size) for name in scene.wrong(rank)}
    expected = {name: mean for name, mean in means(scene.exact).items() if name in wrong}
    factors = [common_ratio(scene.unclipped(r), expected) for r in range(scene.world_size)]
    known = {r: f for r, f in enumerate(factors) if f is not None and abs(f - 1) > _FAR}
    if not known or any(f is None for f in factors):
        mean = mean_of_means(scene.results, scene.owners)
        if wrong and is_mean_of(scene.unclipped(0), mean):
            text = "it is the mean of the ranks' own means, although they have unequal numbers of "
            return Cause.LOSS_SCALING, replace(finding, ranks=()), text + "targets"
        return None
    rank = min(known)
    text = name_of_factor(
        known[rank],
        world_size=scene.world_size,
        weight=scene.exact.weight,
        own_weight=scene.own_weight(rank),
        num_leaves=len(scene.results),
    )
    ranks = () if len(known) == scene.world_size else tuple(known)
    where = f" (on rank {rank})" if scene.world_size > 1 else ""
    names = tuple(expected)
    what = "every gradient" if len(names) == len(scene.exact.total) else "its gradient"
    return (
        Cause.LOSS_SCALING,
        replace(finding, ranks=ranks, names=names),
        f"{what} is the right one times {text}{where}",
    )


_FAR = 1e-2
"""A factor this near to one is no factor."""


def _leaf(scene: Scene) -> Found | None:
    """A leaf that is missing from the sum, or in it twice."""
    found = lost_or_double(scene.unclipped(0), scene.exact, scene.results)
    if found is None:
        return None
    word, leaf = found
    finding = replace(_gradient_finding(scene), ranks=(scene.owners.get(leaf, 0),))
    return Cause.DATA, finding, f"the gradient of leaf {leaf} is {word} in the sum"


def _unsynchronised(scene: Scene, tried: list[str]) -> Generator[Variant, bool, Found | None]:
    """Parameters whose gradient is one rank's own, the last step's, or nothing."""
    wrong = [scene.wrong(rank) for rank in range(scene.world_size)]
    names = tuple(name for name in scene.exact.total if any(name in each for each in wrong))
    ranks = tuple(rank for rank, each in enumerate(wrong) if each)
    if not names:
        return None
    everyone = len(ranks) == scene.world_size
    finding = replace(_gradient_finding(scene), names=names, ranks=() if everyone else ranks)
    for words, explains in _NOT_REDUCED.items():
        if all(explains(scene, rank, name) for rank in ranks for name in wrong[rank]):
            return Cause.UNSYNCHRONISED, finding, words
    if not scene.ranks_differ(names):
        return None
    if len(names) < len(scene.exact.total):
        return Cause.UNSYNCHRONISED, finding, "each rank keeps its own gradient of it"
    if max(len(document["leaves"]) for document in scene.documents) > 1:
        vanished = yield replace(PLAIN, one_leaf_per_rank=True)
        tried.append(_says("one leaf a rank, no accumulation", vanished))
        if vanished:
            detail = "with one leaf a rank the difference is gone"
            return Cause.FLAG_TOO_LATE, finding, detail
    return Cause.UNSYNCHRONISED, finding, "each rank keeps its own gradient of everything"


def _is_stale(scene: Scene, rank: int, name: str) -> bool:
    now, before = scene.gradients[rank], scene.previous[rank]
    return name in now and name in before and ratio(now[name], before[name]) is not None


def _is_nothing(scene: Scene, rank: int, name: str) -> bool:
    gradient = scene.gradients[rank].get(name)
    return gradient is None or not bool(gradient.any())


_NOT_REDUCED = {
    "its gradient is the previous step's (stale)": _is_stale,
    "no gradient of it arrives": _is_nothing,
}


def _by_variants(scene: Scene, tried: list[str]) -> Generator[Variant, bool, Found | None]:
    finding = _gradient_finding(scene)
    questions = [
        (Cause.RANDOM, replace(PLAIN, dropout=False), "without dropout", True),
        (
            Cause.BATCH_NORM,
            replace(PLAIN, frozen_batch_norm=True),
            "with frozen BatchNorm statistics",
            scene.has_batch_norm,
        ),
        (Cause.DTYPE, replace(PLAIN, dtype="fp32"), "in fp32", scene.dtype == "bf16"),
        (Cause.DTYPE, replace(PLAIN, dtype="fp64"), "in fp64", scene.dtype != "fp64"),
    ]
    for cause, variant, words, applies in questions:
        if not applies:
            continue
        vanished = yield variant
        tried.append(_says(words, vanished))
        if vanished:
            return cause, finding, f"{words} the difference is gone"
    wire = "" if scene.local else _rounded_to(scene)
    if wire:
        return Cause.DTYPE, finding, f"its error is that of numbers rounded to {wire}"
    return None


def _rounded_to(scene: Scene) -> str:
    """A narrower dtype whose rounding explains the error of every element, or "".

    Rounding each element once leaves about 0.4 u of the norm; a few times, a little more. Much less
    than that is no rounding to this dtype, and an element that is off by more of what was added up
    in it was not rounded.
    """
    got, exact = scene.unclipped(0), scene.exact
    if any(name not in got for name in exact.total):
        return ""
    errors = {name: (got[name] - exact.mean(name)).abs() for name in exact.total}
    if not all(bool(error.isfinite().all()) for error in errors.values()):
        return ""
    sizes = {name: float(exact.mean(name).norm()) for name in exact.total}
    largest = max((float(errors[n].norm()) / sizes[n] for n in sizes if sizes[n]), default=0.0)
    for dtype, times in _ROUNDINGS.items():
        unit = UNIT_ROUNDOFF[dtype]
        applies = dtype != "fp32" or scene.dtype == "fp64"
        if applies and unit / 8 < largest <= times * unit:
            limits = {n: 2 * times * unit * exact.magnitude[n] / exact.weight for n in sizes}
            if all(bool((errors[n] <= limits[n] + SMALLEST_NORMAL[dtype]).all()) for n in sizes):
                return dtype
    return ""


_ROUNDINGS = {"fp32": 2, "fp16": 2, "bf16": 4}
"""How many unit roundoffs of the norm still are rounding, narrowest error first."""


def _after_the_gradient(scene: Scene) -> Found:
    """Gradients were right; something after them was not."""
    verdict = scene.verdict
    if finding := verdict.first(Kind.REPLICAS):
        detail = "its gradient was right and equal everywhere; something other than the optimizer "
        return Cause.UNSYNCHRONISED, finding, detail + "wrote to it"
    if finding := verdict.first(Kind.MEETING):
        return Cause.UNSYNCHRONISED, finding, finding.detail
    if finding := verdict.first(Kind.BUFFERS):
        own = "each rank keeps its own" if finding.ranks else "not what the leaves make of them"
        cause = Cause.BATCH_NORM if scene.has_batch_norm else Cause.UNSYNCHRONISED
        return cause, finding, f"buffers: {own}"
    if finding := verdict.first(Kind.UPDATE):
        detail = "the same optimizer gives other weights from the same gradient on one rank"
        return Cause.OPTIMIZER, finding, detail
    if finding := verdict.first(Kind.LOSS):
        detail = f"gradients are right, the reported loss is {finding.detail}"
        return Cause.LOSS_SCALING, finding, detail
    return _unexplained(verdict.findings[0])


def _unexplained(finding: Finding) -> Found:
    return Cause.UNKNOWN, finding, f"{finding.kind.value}: {finding.detail}"


def _gradient_finding(scene: Scene) -> Finding:
    """The finding about gradients, naming the ranks that deviate if any do."""
    verdict = scene.verdict
    differ, wrong = verdict.first(Kind.GRADIENT_REPLICAS), verdict.first(Kind.GRADIENT)
    if differ is not None and wrong is not None:
        names = tuple(name for name in scene.exact.total if name in {*differ.names, *wrong.names})
        return replace(wrong, names=names, ranks=differ.ranks)
    found = differ or wrong or verdict.first(Kind.NORM)
    assert found is not None
    return found


def _says(words: str, vanished: bool) -> str:
    return f"{words}: {'gone' if vanished else 'still there'}"
