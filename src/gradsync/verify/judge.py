"""Judges a recorded run against the one-rank reference, step by step, up to the first difference.

See [Note: Bounds] in compare.py for what is compared with what. Where ranks step alone
(`local_sgd`, `diloco`), each is judged against its own leaves, then the weights after each meeting
against those of all ranks before it:

    local_sgd   the mean of the ranks' weights
    diloco      SGD with Nesterov momentum from where the round began, with the mean distance walked

Bounds: the mean of W numbers takes at most W + 1 roundings on the mean of their magnitudes, the
outer step eight more on everything that enters it; the momentum brings its own earlier error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.verify.compare import (
    DTYPE_NAMES,
    SMALLEST_NORMAL,
    Exact,
    add_up,
    clip_factor,
    compare,
    gamma,
    gradient_bounds,
    norm_bound,
    part_of_bound,
    update_bounds,
)
from gradsync.verify.plan import Promise
from gradsync.verify.record import StepTrace, Tensors, Trace, digest
from gradsync.verify.reference import LeafResult, Reference
from gradsync.verify.result import Finding, Kind, minority
from gradsync.verify.run import INNER_STEPS, Saved

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9
_OUTER_ROUNDINGS = 8


@dataclass(kw_only=True, slots=True)
class Observed:
    """One run as one rank sees it, and the reference that it is judged against."""

    rank: int
    promise: Promise
    reference: Reference
    trace: Trace
    ranks: list[list[dict[str, Any]]]
    """Digests of every rank's steps: [rank][step], see `digests_of`."""

    def documents(self, place: int) -> list[dict[str, Any]]:
        """Every rank's digests of the step at `place`."""
        return [steps[place] for steps in self.ranks]

    def leaf_results(self, place: int) -> list[LeafResult]:
        """Every leaf of a step on its own, at the weights that the run had."""
        step = self.trace.steps[place]
        buffers = self.trace.buffers_before(place)
        return self.reference.leaf_results(step.number, step.before, buffers)

    def exact(self, place: int) -> Exact:
        """The gradient that this rank must have in a step, at the weights that the run had."""
        results = self.leaf_results(place)
        if self.promise.local:
            own = {leaf["index"] for leaf in self.ranks[self.rank][place]["leaves"]}
            results = [result for result in results if result.index in own]
        return add_up(results)


@dataclass(slots=True)
class Verdict:
    """The findings in the first step that is not as promised; none when all are."""

    findings: list[Finding] = field(default_factory=list)
    part_of_bound: float = 0.0
    """Largest share of a gradient's bound that was used."""

    @property
    def passed(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def first(self, *kinds: Kind) -> Finding | None:
        """The first finding of one of these kinds."""
        return next((f for f in self.findings if f.kind in kinds), None)

    def add(
        self,
        kind: Kind,
        step: int,
        names: Sequence[str] = (),
        ranks: Sequence[int] = (),
        detail: str = "",
    ) -> None:
        """Note one finding; see there."""
        found = Finding(kind=kind, step=step, names=names, ranks=ranks, detail=detail)
        self.findings.append(found)


def judge(run: Observed) -> Verdict:
    """Check every step until one is not as promised; later ones would only show what follows."""
    verdict = Verdict()
    for place in range(len(run.trace.steps)):
        if place == 0:
            _check_start(run, verdict)
        _check_data(run, place, verdict)
        _check_random(run, place, verdict)
        _check_moved(run, place, verdict)
        if not run.promise.local:
            _check_replicas(run, place, "gradient", Kind.GRADIENT_REPLICAS, verdict)
        _check_gradient(run, place, verdict)
        _check_update(run, place, verdict)
        if not run.promise.local:
            _check_replicas(run, place, "after", Kind.REPLICAS, verdict)
            _check_replicas(run, place, "buffers", Kind.BUFFERS, verdict)
        _check_buffers(run, place, verdict)
        if verdict.findings:
            break
    return verdict


def _check_start(run: Observed, verdict: Verdict) -> None:
    """All ranks begin with rank 0's weights, or with the checkpoint's weights and state."""
    saved = run.reference.saved
    expected = run.reference.start() if saved is None else saved.weights
    wanted = {name: digest(tensor) for name, tensor in expected.items()}
    wrong: set[str] = set()
    ranks = []
    for rank, document in enumerate(run.documents(0)):
        if names := [name for name, found in document["before"].items() if found != wanted[name]]:
            wrong.update(names)
            ranks.append(rank)
    detail = ""
    if saved is not None:
        got, kept = run.trace.start_state[0], saved.optimizer[0]
        lost = [key for key in {**kept, **got} if digest(got.get(key)) != digest(kept.get(key))]
        if lost:
            wrong.update(key.partition("/")[2] for key in lost)
            detail = "the optimizer's state is not the checkpoint's"
    if wrong:
        names = [name for name in wanted if name in wrong]
        verdict.add(Kind.START, run.trace.steps[0].number, names, ranks, detail)


def _check_data(run: Observed, place: int, verdict: Verdict) -> None:
    """Each sample of the global batch was trained exactly once, on whatever rank."""
    number, documents = run.trace.steps[place].number, run.documents(place)
    wanted = Counter(sample for leaf in run.reference.traces[number] for sample in leaf.samples)
    trained = [
        [sample for leaf in document["leaves"] for sample in leaf["samples"]]
        for document in documents
    ]
    seen = Counter(sample for samples in trained for sample in samples)
    missing, extra = wanted - seen, seen - wanted
    home = run.reference.owner_of
    parts = [f"missing: {_samples(missing, home)}"] if missing else []
    parts += [f"too often: {_samples(extra, home)}"] if extra else []
    if parts:
        ranks = [rank for rank, samples in enumerate(trained) if extra.keys() & set(samples)]
        verdict.add(Kind.DATA, number, ranks=ranks, detail="; ".join(parts))


def _samples(counter: Counter[str], home: dict[str, int]) -> str:
    names = [f"sample {home[sample]}" for sample in counter.elements() if sample in home]
    shown = ", ".join(names[:4])
    if len(names) > 4:
        shown = f"{shown} and {len(names) - 4} more"
    unknown = counter.total() - len(names)
    rest = f"{unknown} not in the data set as rank 0 reads it"
    return ", ".join(([shown] if names else []) + ([rest] if unknown else []))


def _check_random(run: Observed, place: int, verdict: Verdict) -> None:
    """The state that dropout draws from belongs to (step, leaf), not to a rank."""
    number = run.trace.steps[place].number
    wanted = {leaf.index: leaf.random for leaf in run.reference.traces[number]}
    wrong = [
        (rank, leaf["index"])
        for rank, document in enumerate(run.documents(place))
        for leaf in document["leaves"]
        if leaf["index"] in wanted and leaf["random"] != wanted[leaf["index"]]
    ]
    if wrong:
        detail = f"leaf {wrong[0][1]} on rank {wrong[0][0]}"
        verdict.add(Kind.RANDOM, number, ranks=sorted({rank for rank, _ in wrong}), detail=detail)


def _check_moved(run: Observed, place: int, verdict: Verdict) -> None:
    """Weights stay as they are between forward and optimizer."""
    moved = [
        [name for name, now in document["at_step"].items() if now != document["before"][name]]
        for document in run.documents(place)
    ]
    names = list(dict.fromkeys(name for each in moved for name in each))
    if names:
        ranks = [rank for rank, each in enumerate(moved) if each]
        verdict.add(Kind.MOVED, run.trace.steps[place].number, names, ranks)


def _check_replicas(run: Observed, place: int, part: str, kind: Kind, verdict: Verdict) -> None:
    """One part of a step has the same bits on all ranks."""
    documents = run.documents(place)
    ranks_of = {
        name: minority([document[part].get(name, "") for document in documents])
        for name in documents[0][part]
    }
    names = [name for name, ranks in ranks_of.items() if ranks]
    if names:
        ranks = sorted({rank for each in ranks_of.values() for rank in each})
        verdict.add(kind, run.trace.steps[place].number, names, ranks)


def _check_gradient(run: Observed, place: int, verdict: Verdict) -> None:
    """Gradient, norm and loss lie within what the order of sums explains."""
    step, exact = run.trace.steps[place], run.exact(place)
    if not exact.weight:
        return
    if _check_finite(step, exact, verdict):
        return
    right = abs(step.loss - exact.loss) <= exact.loss_bound and step.weight == exact.weight
    if not (right or run.promise.local):
        detail = f"{step.loss:.9g} over {step.weight:g} targets, expected {exact.loss:.9g} over "
        verdict.add(Kind.LOSS, step.number, detail=f"{detail}{exact.weight:g}")
    if not run.promise.bounded:
        return
    clip_norm = run.reference.settings.clip_norm
    bounds = gradient_bounds(exact, run.promise, len(run.ranks), clipped=clip_norm is not None)
    factor = clip_factor(step.norm, clip_norm)
    parts = {}
    for name in run.trace.trainable:
        got = step.gradient.get(name)
        if name in exact.total and got is not None:
            bound = bounds[name] * max(factor, 1e-30)
            parts[name] = part_of_bound(got, exact.mean(name) * factor, bound)
        else:  # no gradient is right only where no leaf has one
            zeros = got is not None and run.promise.zeros_when_unused and not bool(got.any())
            absent = got is None and name not in exact.total
            parts[name] = 0.0 if absent or zeros else math.inf
    verdict.part_of_bound = max(verdict.part_of_bound, *parts.values())
    wrong = [name for name, part in parts.items() if part > 1]
    if wrong:
        detail = f"{parts[wrong[0]]:.3g} times the bound"
        verdict.add(Kind.GRADIENT, step.number, wrong, detail=detail)
    if step.norm is not None and abs(step.norm - exact.norm()) > norm_bound(exact, bounds):
        detail = f"{step.norm:.9g}, expected {exact.norm():.9g}"
        verdict.add(Kind.NORM, step.number, detail=detail)


def _check_finite(step: StepTrace, exact: Exact, verdict: Verdict) -> bool:
    """Whether something is not finite on one rank either: then no bound applies, and no strategy
    is to blame."""
    names = [name for name, total in exact.total.items() if not bool(total.isfinite().all())]
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
    if detail:
        verdict.add(Kind.FINITE, step.number, names, detail=detail)
    return bool(detail)


def _check_update(run: Observed, place: int, verdict: Verdict) -> None:
    """The optimizer, applied to the run's own gradient, gives the run's own weights and state."""
    step = run.trace.steps[place]
    if not step.updated:
        return
    before = run.trace.state_before(place)
    weights, states = run.reference.update(step.before, before, step.gradient)
    wrong = []
    for name in weights:
        expected = {"": weights[name]} | _slots_of(name, states)
        got = {"": step.updated[name]} | _slots_of(name, step.state)
        if all(compare(got.get(slot), expected[slot])[3] for slot in expected):
            continue
        gradient = step.gradient.get(name)
        if run.promise.kind != "bitwise" and gradient is not None:
            bounds = update_bounds(
                name,
                group=run.reference.optimizer_group,
                weight=step.before[name],
                gradient=gradient,
                before=before[0],
                after=states,
            )
            if all(
                slot in got and part_of_bound(got[slot], expected[slot].double(), bound) <= 1
                for slot, bound in bounds.items()
            ):
                continue
        wrong.append(name)
    if wrong:
        ranks = [run.rank] if run.promise.local else []
        verdict.add(Kind.UPDATE, step.number, wrong, ranks)


def _slots_of(name: str, states: Tensors) -> Tensors:
    """Optimizer state of one parameter, by slot."""
    keys = {key: key.removesuffix(f"/{name}") for key in states if key.endswith(f"/{name}")}
    return {slot: states[key] for key, slot in keys.items() if "/" not in slot}


def _check_buffers(run: Observed, place: int, verdict: Verdict) -> None:
    """Floating buffers move by the mean of what leaves with targets do to them, integers by the
    largest change ([Note: Buffers] in sync/buffers.py). Where ranks step alone, those that no leaf
    changes must stay as they are."""
    step = run.trace.steps[place]
    results = [result for result in run.leaf_results(place) if result.weight]
    wrong = []
    for name, start in run.trace.buffers_before(place).items():
        ends = [result.buffers[name] for result in results]
        if run.promise.local and not all(torch.equal(end, start) for end in ends):
            continue
        if not _moved_rightly(start, step.buffers[name], ends):
            wrong.append(name)
    if wrong:
        verdict.add(Kind.BUFFERS, step.number, wrong)


def _moved_rightly(start: Tensor, got: Tensor, ends: list[Tensor]) -> bool:
    """Whether a buffer ended where its ends after each leaf say."""
    changes = [end.double() - start.double() for end in ends if not torch.equal(end, start)]
    moved = got.double() - start.double()
    if not start.is_floating_point():
        largest = max((float(change.abs().max()) for change in changes), default=0.0)
        return float(moved.abs().max()) == largest
    if not changes:
        return torch.equal(got, start)
    stack = torch.stack(changes)
    dtype = DTYPE_NAMES[start.dtype]
    # Rounded once at each leaf's end and once when the mean is put back.
    bound = gamma(3, dtype) * (start.double().abs() + stack.abs().sum(0)) + SMALLEST_NORMAL[dtype]
    return part_of_bound(got, start.double() + stack.mean(0), bound) <= 1


def judge_local(run: Observed, comm: Communicator, strategy: str) -> Verdict:
    """Every rank checks its own gradients and updates; the meetings are checked with all weights.

    All ranks call it; the verdict is the same everywhere.
    """
    own = judge(run)
    told = all_gather_json(comm, [asdict(finding) for finding in own.findings])
    parts = all_gather_json(comm, own.part_of_bound)
    verdict = Verdict([Finding(**found) for each in told for found in each], max(parts))
    _check_meetings(run, comm, strategy, verdict)
    _check_losses(run, comm, verdict)
    first = min((finding.step for finding in verdict.findings), default=0)
    verdict.findings = [finding for finding in verdict.findings if finding.step == first]
    return verdict


def _check_losses(run: Observed, comm: Communicator, verdict: Verdict) -> None:
    """The reported loss is the mean over the leaves of all ranks."""
    own = []
    for place in range(len(run.trace.steps)):
        exact = run.exact(place)
        sums = (exact.loss * exact.weight, exact.weight, exact.loss_bound * exact.weight)
        own.append(sums if exact.weight else (0.0, 0.0, 0.0))
    everyone = all_gather_json(comm, own)
    for place, step in enumerate(run.trace.steps):
        losses, weights, bounds = zip(*(rank[place] for rank in everyone), strict=True)
        total, weight = sum(losses), sum(weights)
        # The ranks' sums are added once more: W roundings of fp64, far inside of 2^-40.
        bound = (sum(bounds) + 2.0**-40 * sum(map(abs, losses))) / weight
        if abs(step.loss - total / weight) > bound or step.weight != weight:
            detail = f"{step.loss:.9g}, expected {total / weight:.9g}"
            verdict.add(Kind.LOSS, step.number, detail=detail)


def _check_meetings(run: Observed, comm: Communicator, strategy: str, verdict: Verdict) -> None:
    """After each meeting all ranks hold the weights that it must give."""
    meetings = Meetings(strategy, run.trace, run.reference.saved)
    for place, step in enumerate(run.trace.steps):
        if (place + 1) % INNER_STEPS:
            continue
        # A rank without leaves stood still.
        own = step.updated or step.before
        own = {name: own[name] for name in run.trace.trainable}
        if name := meetings.wrong_weight(place, gather_tensors(comm, own, own)):
            verdict.add(Kind.MEETING, step.number, [name])
        wanted = {name: digest(tensor) for name, tensor in step.after.items()}
        for rank, document in enumerate(run.documents(place)):
            wrong = [name for name in wanted if document["after"][name] != wanted[name]]
            if wrong:
                verdict.add(Kind.REPLICAS, step.number, wrong, [rank])


class Meetings:
    """The weights that each meeting of one run must give, and the outer momentum between them.

    Args:
        strategy: local_sgd or diloco.
        trace: rank 0's.
        saved: the checkpoint that the run began with.
    """

    def __init__(self, strategy: str, trace: Trace, saved: Saved | None) -> None:
        self._outer = strategy == "diloco"
        self._trace = trace
        self._velocity: dict[str, tuple[Tensor, Tensor]] = {}
        if saved is not None and saved.strategy == strategy:
            for key, tensor in saved.extra.items():
                exact = tensor.double()
                self._velocity[key.partition("/")[2]] = (exact, torch.zeros_like(exact))

    def wrong_weight(self, place: int, weights: Sequence[Tensors]) -> str:
        """The first weight that is not what all ranks' weights before the meeting give, or "".

        Args:
            place: of the step that ends the round.
            weights: every rank's trainable parameters as its own optimizer left them.
        """
        after = self._trace.steps[place].after
        start = self._trace.steps[place + 1 - INNER_STEPS].before
        for name in self._trace.trainable:
            stack = torch.stack([each[name].double() for each in weights])
            dtype = DTYPE_NAMES[after[name].dtype]
            expected = stack.mean(0)
            bound = gamma(len(weights) + 1, dtype) * stack.abs().mean(0)
            if self._outer:
                begun = start[name].double()
                expected, bound = self._step_out(name, begun, expected, bound, dtype)
            if part_of_bound(after[name], expected, bound + SMALLEST_NORMAL[dtype]) > 1:
                return name
        return ""

    def _step_out(
        self, name: str, begun: Tensor, mean: Tensor, bound: Tensor, dtype: str
    ) -> tuple[Tensor, Tensor]:
        """One outer step and how far it may be off; diloco's algorithm 1."""
        zeros = torch.zeros_like(begun)
        old, old_bound = self._velocity.get(name, (zeros, zeros))
        delta = begun - mean
        rounded = gamma(_OUTER_ROUNDINGS, dtype) * (begun.abs() + mean.abs() + old.abs())
        error = bound + rounded
        velocity = _OUTER_MOMENTUM * old + delta
        velocity_bound = _OUTER_MOMENTUM * old_bound + error
        self._velocity[name] = (velocity, velocity_bound)
        walked = delta + _OUTER_MOMENTUM * velocity
        return (
            begun - _OUTER_LR * walked,
            _OUTER_LR * (error + _OUTER_MOMENTUM * velocity_bound) + rounded,
        )


def gather_tensors(
    comm: Communicator, tensors: Mapping[str, Tensor | None], like: Tensors
) -> list[Tensors]:
    """Every rank's named CPU tensors, in rank order; a tensor that is None is left out.

    One all-gather per name over the whole group: uint8 [ranks x bytes], overlapping nothing.

    Args:
        comm: all ranks call it.
        tensors: this rank's.
        like: all names, with their shapes and dtypes, alike on all ranks.
    """
    present = all_gather_json(comm, [name for name in like if tensors.get(name) is not None])
    found: list[Tensors] = [{} for _ in present]
    for name, shaped in like.items():
        tensor = tensors.get(name)
        mine = torch.zeros_like(shaped) if tensor is None else tensor.contiguous()
        flat = mine.reshape(-1).view(torch.uint8)
        output = torch.empty(comm.world_size * len(flat), dtype=torch.uint8)
        comm.all_gather(output, flat).wait()
        for rank, part in enumerate(output.view(comm.world_size, -1)):
            if name in present[rank]:
                found[rank][name] = part.clone().view(shaped.dtype).view(shaped.shape)
    return found
