"""Judge a recorded run against the one-rank reference, step by step, up to the first difference.

docs/guide/verifying.md, "The bounds": what is compared, and the allowed differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.commands.verify.compare import (
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
from gradsync.commands.verify.record import DTYPE_NAMES, State, Tensors, Trace, digest
from gradsync.commands.verify.reference import MicroBatchResult, Reference
from gradsync.commands.verify.result import Finding, Kind
from gradsync.commands.verify.run import INNER_STEPS
from gradsync.commands.verify.settings import Promise

_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9
_OUTER_ROUNDINGS = 8
_CLOSE = 1e-3  # largest relative rest of a gradient that is a multiple of the right one
_FAR = 1e-2  # a factor this close to one is no factor


@dataclass(kw_only=True, slots=True)
class Observed:
    """One run as one rank sees it, and its reference."""

    rank: int
    promise: Promise
    reference: Reference
    trace: Trace
    ranks: list[list[dict[str, Any]]]  # `StepTrace.digests` of every [rank][step]

    def documents(self, place: int) -> list[dict[str, Any]]:
        """Every rank's digests of the step at `place`."""
        return [steps[place] for steps in self.ranks]

    def results(self, place: int) -> list[MicroBatchResult]:
        """Every micro-batch of a step, computed alone at the run's weights."""
        step = self.trace.steps[place]
        return self.reference.results(step.number, step.before.weights, step.before.buffers)

    def exact(self, place: int) -> Exact:
        """The gradient that this rank must have in a step, at the run's weights."""
        results = self.results(place)
        if self.promise.local:
            own = {each["index"] for each in self.ranks[self.rank][place]["micro_batches"]}
            results = [result for result in results if result.index in own]
        return add_up(results)


@dataclass(slots=True)
class Verdict:
    """The findings in the first step that breaks a promise; none if all steps hold it."""

    findings: list[Finding] = field(default_factory=list)
    part_of_bound: float = 0.0  # largest part of a gradient's bound that was used

    def add(self, kind: Kind, step: int, names: Sequence[str] = (), **more: Any) -> None:
        """Record one finding."""
        self.findings.append(Finding(kind=kind, step=step, names=names, **more))


def judge(run: Observed) -> Verdict:
    """Check steps until one breaks the promise; later ones would only show its consequences."""
    verdict = Verdict()
    for place in range(len(run.trace.steps)):
        check = _StepCheck(run, place, verdict)
        if place == 0:
            check.start()
        check.data()
        check.moved()
        wrong = check.gradient()
        if not run.promise.local:
            check.replicas("gradient", Kind.GRADIENT_REPLICAS, wrong)
        check.update()
        if not run.promise.local:
            check.replicas("after", Kind.REPLICAS)
            check.replicas("buffers", Kind.BUFFERS)
        check.buffers()
        if verdict.findings:
            break
    return verdict


class _StepCheck:
    """Compares a step of a run with the reference; each method adds findings to the verdict."""

    def __init__(self, run: Observed, place: int, verdict: Verdict) -> None:
        self._run, self._place, self._verdict = run, place, verdict
        self._promise, self._reference = run.promise, run.reference
        self._step = run.trace.steps[place]
        self._documents = run.documents(place)

    def _found(self, kind: Kind, names: Sequence[str] = (), **more: Any) -> None:
        self._verdict.add(kind, self._step.number, names, **more)

    def _found_on_ranks(
        self, kind: Kind, wrong: Sequence[set[str]], lost: Sequence[str] = (), detail: str = ""
    ) -> None:
        """A finding about the tensors in `wrong`, which has a set for each rank, and `lost`."""
        every = set(lost).union(*wrong)
        if every:
            names = [name for name in self._step.before.weights if name in every]
            ranks = [rank for rank, each in enumerate(wrong) if each]
            self._found(kind, names, ranks=ranks, detail=detail)

    def start(self) -> None:
        """All ranks begin with rank 0's weights, or with the checkpoint's weights and state."""
        saved = self._reference.task.saved
        expected = self._reference.weights() if saved is None else saved.weights
        wanted = {name: digest(tensor) for name, tensor in expected.items()}
        wrong = [
            {name for name, found in document["before"].items() if found != wanted[name]}
            for document in self._documents
        ]
        lost = []
        if saved is not None:
            got, kept = self._step.before.optimizer, saved.optimizer
            if self._reference.task.strategy == saved.strategy:
                got, kept = {**got, **self._step.before.extra}, {**kept, **saved.extra}
            lost = [key for key in {**kept, **got} if digest(got.get(key)) != digest(kept.get(key))]
        detail = "the optimizer's state is not the checkpoint's" if lost else ""
        lost = [key.partition("/")[2] for key in lost]
        self._found_on_ranks(Kind.START, wrong, lost, detail)

    def data(self) -> None:
        """Each sample of the global batch was trained exactly once, on any rank, and its dropout
        depends on (step, micro-batch), not on the rank."""
        traces = self._reference.traces[self._step.number]
        wanted = Counter(sample for each in traces for sample in each["samples"])
        trained = [
            [sample for each in document["micro_batches"] for sample in each["samples"]]
            for document in self._documents
        ]
        seen = Counter(chain.from_iterable(trained))
        missing, extra = wanted - seen, seen - wanted
        if missing or extra:
            ranks = [rank for rank, samples in enumerate(trained) if extra.keys() & set(samples)]
            detail = f"{missing.total()} samples are missing, {extra.total()} too many or unknown"
            self._found(Kind.DATA, ranks=ranks, detail=detail)
        states = {each["index"]: each["random"] for each in traces}
        wrong = [
            (rank, each["index"])
            for rank, document in enumerate(self._documents)
            for each in document["micro_batches"]
            if each["random"] != states.get(each["index"], each["random"])
        ]
        if wrong:
            detail = f"micro-batch {wrong[0][1]} on rank {wrong[0][0]} drew from another state"
            self._found(Kind.RANDOM, ranks=sorted({rank for rank, _ in wrong}), detail=detail)

    def moved(self) -> None:
        """Weights do not change between forward and optimizer."""
        moved = [
            {name for name, now in document["at_step"].items() if now != document["before"][name]}
            for document in self._documents
        ]
        self._found_on_ranks(Kind.MOVED, moved)

    def replicas(self, part: str, kind: Kind, wrong: Sequence[str] = ()) -> None:
        """One part of a step has the same bits on all ranks. Clipping by a wrong norm changes all
        gradients: only those that are `wrong` are named, if any."""
        documents = self._documents
        ranks_of = {
            name: minority([document[part].get(name, "") for document in documents])
            for name in documents[0][part]
        }
        differ = [name for name, ranks in ranks_of.items() if ranks]
        if names := [name for name in differ if name in wrong] or differ:
            self._found(kind, names, ranks=sorted({r for name in names for r in ranks_of[name]}))

    def gradient(self) -> list[str]:
        """Gradient, norm and loss differ by no more than the order of sums explains. Returns the
        names of wrong gradients."""
        step, exact = self._step, self._run.exact(self._place)
        if not exact.weight or self._is_not_finite(exact):
            return []
        loss, bound = exact.loss_sum / exact.weight, exact.loss_sum_bound / exact.weight
        right = abs(step.loss - loss) <= bound and step.weight == exact.weight
        if not (right or self._promise.local):
            said = f"{step.loss:.9g} over {step.weight:g} targets, expected {loss:.9g} over "
            self._found(Kind.LOSS, detail=f"{said}{exact.weight:g}")
        if not self._promise.bounded:
            return []
        bounds = gradient_bounds(exact, self._promise, len(self._documents))
        factor, means = clip_factor(step.norm), exact.means()
        parts = {}
        for name in self._run.trace.trainable:
            got = step.gradient.get(name)
            if name in means and got is not None:
                bound = bounds[name] * max(factor, 1e-30)
                parts[name] = part_of_bound(got, means[name] * factor, bound)
            else:  # no gradient is right only if no micro-batch has one
                zeros = got is not None and self._promise.zeros_when_unused and not bool(got.any())
                absent = got is None and name not in means
                parts[name] = 0.0 if absent or zeros else math.inf
        self._verdict.part_of_bound = max(self._verdict.part_of_bound, *parts.values())
        if wrong := [name for name, part in parts.items() if part > 1]:
            ratio = common_ratio(step.gradient, {name: means.get(name) for name in wrong})
            if ratio is None or abs(ratio / factor - 1) < _FAR:
                self._found(Kind.GRADIENT, wrong, detail=f"{parts[wrong[0]]:.3g} times the bound")
            else:
                detail = f"{ratio / factor:.6g} times it on rank {self._run.rank}"
                self._found(Kind.SCALED, wrong, detail=detail)
        if step.norm is not None and abs(step.norm - exact.norm()) > norm_bound(exact, bounds):
            self._found(Kind.NORM, detail=f"{step.norm:.9g}, expected {exact.norm():.9g}")
        return wrong

    def _is_not_finite(self, exact: Exact) -> bool:
        """Whether a value is not finite even on one rank: then no bound applies, and the strategy
        is not the cause."""
        means = exact.means()
        names = [name for name, mean in means.items() if not bool(mean.isfinite().all())]
        if wrong := bool(names) or not math.isfinite(exact.loss_sum):
            self._found(Kind.FINITE, names, detail=f"the loss is {exact.loss_sum / exact.weight}")
        return wrong

    def update(self) -> None:
        """The optimizer, applied to the run's gradient, gives the run's weights and state: their
        bits, or within their bounds."""
        step = self._step
        if not step.updated:
            return
        weights, states = self._reference.update(step.before, step.gradient)
        wrong = []
        for name, weight in weights.items():
            expected = {"": weight} | _slots_of(name, states)
            got = {"": step.updated[name]} | _slots_of(name, step.after.optimizer)
            if all(compare(got.get(slot), expected[slot])[2] for slot in expected):
                continue
            gradient, bounds = step.gradient.get(name), {}
            if gradient is not None and not self._promise.same_bits:
                bounds = update_bounds(
                    name,
                    group=self._reference.optimizer_group,
                    weight=step.before.weights[name],
                    gradient=gradient,
                    before=step.before.optimizer,
                    after=states,
                )
            within = (
                slot in got and part_of_bound(got[slot], expected[slot].double(), bound) <= 1
                for slot, bound in bounds.items()
            )
            if not bounds or not all(within):
                wrong.append(name)
        if wrong:
            ranks = [self._run.rank] if self._promise.local else []
            self._found(Kind.UPDATE, wrong, ranks=ranks)

    def buffers(self) -> None:
        """Floating buffers move by the mean change over micro-batches with targets, integers by the
        largest change ([Note: Buffers] in sync/buffers.py). If ranks step alone, buffers that no
        micro-batch changes must keep their values."""
        results = [result for result in self._run.results(self._place) if result.weight]
        wrong = []
        for name, start in self._step.before.buffers.items():
            ends = [result.buffers[name] for result in results]
            if self._promise.local and not all(torch.equal(end, start) for end in ends):
                continue
            if not moved_rightly(start, self._step.after.buffers[name], ends):
                wrong.append(name)
        if wrong:
            self._found(Kind.BUFFERS, wrong)


def minority(values: list[str]) -> tuple[int, ...]:
    """Ranks whose value is not the most frequent one. Of equally frequent values, rank 0's or the
    lowest rank's counts as right."""
    best = max(dict.fromkeys(values), key=values.count)
    return tuple(rank for rank, value in enumerate(values) if value != best)


def common_ratio(
    gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> float | None:
    """c if gradients g = c x h for all `expected` h together; None if there is no such factor.

    With c = <g, h> / <h, h> the rest |g - c h| / |g| is zero up to rounding where it holds, and of
    order one elsewhere.
    """
    pairs = [(gradients.get(name), h) for name, h in expected.items()]
    found = [(g.double(), h.double()) for g, h in pairs if g is not None and h is not None]
    if len(found) < len(pairs):
        return None
    g, h = (torch.cat([each.reshape(-1) for each in side]) for side in zip(*found, strict=True))
    if not bool(h.any()) or not bool(g.any()) or not bool(g.isfinite().all()):
        return None
    factor = float(g @ h) / float(h @ h)
    rest = float((g - factor * h).norm() / g.norm())
    return factor if factor and rest < _CLOSE else None


def _slots_of(name: str, states: Tensors) -> Tensors:
    """Optimizer state of one parameter, by slot."""
    keys = {key: key.removesuffix(f"/{name}") for key in states if key.endswith(f"/{name}")}
    return {slot: states[key] for key, slot in keys.items() if "/" not in slot}


def moved_rightly(start: Tensor, got: Tensor, ends: list[Tensor]) -> bool:
    """Whether a buffer ended at the value that its values after each micro-batch imply."""
    changes = [end.double() - start.double() for end in ends if not torch.equal(end, start)]
    moved = got.double() - start.double()
    if not start.is_floating_point():
        largest = max((float(change.abs().max()) for change in changes), default=0.0)
        return float(moved.abs().max()) == largest
    if not changes:
        return torch.equal(got, start)
    stack = torch.stack(changes)
    dtype = DTYPE_NAMES[start.dtype]
    # Rounded once at each micro-batch's end and once when the mean is written back.
    bound = gamma(3, dtype) * (start.double().abs() + stack.abs().sum(0)) + SMALLEST_NORMAL[dtype]
    return part_of_bound(got, start.double() + stack.mean(0), bound) <= 1


def judge_local(run: Observed, comm: Communicator) -> Verdict:
    """Judge ranks that step alone: every rank its gradients and updates, and all together what is
    reported and the meetings. All ranks call it and get the same verdict."""
    own, exacts = judge(run), [run.exact(place) for place in range(len(run.trace.steps))]
    losses = [[exact.loss_sum, exact.weight, exact.loss_sum_bound] for exact in exacts]
    told = all_gather_json(comm, asdict(own) | {"losses": losses})
    found = [Finding(**each) for rank in told for each in rank["findings"]]
    verdict = Verdict(found, max(rank["part_of_bound"] for rank in told))
    for place, step in enumerate(run.trace.steps):
        if (place + 1) % INNER_STEPS == 0:
            # A rank without micro-batches did not move.
            ended = step.updated or step.before.weights
            ended = {name: ended[name] for name in run.trace.trainable}
            begun = run.trace.steps[place + 1 - INNER_STEPS].before
            if name := wrong_meeting(begun, gather_tensors(comm, ended), step.after):
                verdict.add(Kind.MEETING, step.number, [name])
            wanted = {name: digest(tensor) for name, tensor in step.after.weights.items()}
            for rank, document in enumerate(run.documents(place)):
                if wrong := [name for name in wanted if document["after"][name] != wanted[name]]:
                    verdict.add(Kind.REPLICAS, step.number, wrong, ranks=[rank])
        # The reported loss is the mean over the micro-batches of all ranks.
        losses, weights, bounds = zip(*(rank["losses"][place] for rank in told), strict=True)
        total, weight = sum(losses), sum(weights)
        # Summing the ranks' sums adds W roundings of fp64, far below 2^-40.
        bound = (sum(bounds) + 2.0**-40 * sum(map(abs, losses))) / weight
        if abs(step.loss - total / weight) > bound or step.weight != weight:
            detail = f"{step.loss:.9g}, expected {total / weight:.9g}"
            verdict.add(Kind.LOSS, step.number, detail=detail)
    first = min((finding.step for finding in verdict.findings), default=0)
    verdict.findings = [finding for finding in verdict.findings if finding.step == first]
    return verdict


def wrong_meeting(begun: State, weights: Sequence[Tensors], after: State) -> str:
    """The first parameter that does not end a round, begun at `begun`, as it must, or "". `weights`
    are every rank's before the meeting; an outer optimizer has its momentum in `extra`."""
    old = {key.partition("/")[2]: momentum.double() for key, momentum in begun.extra.items()}
    new = {key.partition("/")[2]: momentum for key, momentum in after.extra.items()}
    for name in weights[0]:
        stack = torch.stack([each[name].double() for each in weights])
        dtype = DTYPE_NAMES[after.weights[name].dtype]
        expected = stack.mean(0)
        bound = gamma(len(weights) + 1, dtype) * stack.abs().mean(0) + SMALLEST_NORMAL[dtype]
        if name in new:  # diloco's algorithm 1
            start = begun.weights[name].double()
            before = old.get(name, torch.zeros_like(start))
            sizes = start.abs() + expected.abs() + before.abs()
            rounded = gamma(_OUTER_ROUNDINGS, dtype) * sizes
            momentum = _OUTER_MOMENTUM * before + start - expected
            if part_of_bound(new[name], momentum, bound + rounded) > 1:
                return name
            expected = start - _OUTER_LR * (start - expected + _OUTER_MOMENTUM * momentum)
            bound = _OUTER_LR * (1 + _OUTER_MOMENTUM) * (bound + rounded) + rounded
        if part_of_bound(after.weights[name], expected, bound) > 1:
            return name
    return ""


def gather_tensors(comm: Communicator, tensors: Tensors) -> list[Tensors]:
    """Every rank's named CPU tensors, in rank order; names, shapes and dtypes are alike on all. One
    all-gather per name over all ranks, uint8; it overlaps nothing."""
    found: list[Tensors] = [{} for _ in range(comm.world_size)]
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1).view(torch.uint8)
        output = torch.empty(comm.world_size * len(flat), dtype=torch.uint8)
        comm.all_gather(output, flat).wait()
        for rank, part in enumerate(output.view(tensor.dtype).view(-1, *tensor.shape)):
            found[rank][name] = part
    return found
