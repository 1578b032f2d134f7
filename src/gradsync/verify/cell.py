"""One cell of the matrix: train, compare, and say why if it is not as promised.

All ranks call `run_cell`; rank 0 judges and knows the result.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.base import Communicator
from gradsync.comm.groups import Groups
from gradsync.comm.single import SingleCommunicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.verify.diagnose import Scene, diagnose
from gradsync.verify.difference import Difference
from gradsync.verify.evidence import Evidence, leaf_results
from gradsync.verify.exact import add_up
from gradsync.verify.finding import Diagnosis, Finding, Kind
from gradsync.verify.free_run import bits, first_difference
from gradsync.verify.gather import gather_tensors
from gradsync.verify.judge import Verdict, judge
from gradsync.verify.local import judge_local
from gradsync.verify.plan import PLAIN, Cell, Settings, Variant
from gradsync.verify.promise import promise_of
from gradsync.verify.reference import Reference
from gradsync.verify.repeat import check_forward
from gradsync.verify.result import Result
from gradsync.verify.runner import Prepare, Task, strategy_options, train_traced
from gradsync.verify.saved import Saved
from gradsync.verify.trace import Trace, digests_of

OneRankRuns = dict[tuple[str, str, Variant, Settings], Trace]
"""Plain one-rank runs: the same for most strategies."""


@dataclass(kw_only=True, slots=True)
class Setting:
    """Where cells run, and what a test may put in their way."""

    settings: Settings
    comm: Communicator
    groups: Groups | None = None
    """For `hierarchical`."""
    prepare: Prepare | None = None
    """May replace parts of the loop; a seam for tests."""
    saved: Saved | None = None
    """A checkpoint to start from."""
    one_rank_runs: OneRankRuns = field(default_factory=dict)
    """Kept from cell to cell."""


@dataclass(slots=True)
class _Attempt:
    """One variant of the cell, on one rank."""

    trace: Trace
    verdict: Verdict = field(default_factory=Verdict)
    """Rank 0's is the one that counts."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """Rank 0 only."""
    evidence: Evidence | None = None
    """None on ranks that have nothing to judge."""


def run_cell(cell: Cell, setting: Setting) -> tuple[Result, Trace]:
    """Run one cell; all ranks call it.

    Returns:
        what there is to say (rank 0's is complete), and this rank's record of the plain run.
    """
    started = time.perf_counter()
    attempt = _attempt(cell, setting, PLAIN)
    comm = setting.comm
    passed = broadcast_json(comm, attempt.verdict.passed)
    diagnosis = None if passed else _explain(cell, setting, attempt)
    promise = promise_of(cell.strategy)
    result = Result(
        strategy=cell.strategy,
        world_size=cell.world_size,
        model=cell.model,
        dtype=cell.dtype,
        promise=promise.kind,
        says=promise.says,
        status="passed" if passed else "failed",
        bitwise=all(d.bitwise for d in attempt.differences.values()),
        differences={name: asdict(d) for name, d in attempt.differences.items()},
        part_of_bound=attempt.verdict.part_of_bound,
        losses=attempt.trace.losses,
        weights_sha256=weights_sha256(attempt.trace.steps[-1].after.items()),
        seconds=time.perf_counter() - started,
    )
    if diagnosis is not None:
        result.cause, result.sentence = diagnosis.cause.value, diagnosis.sentence
        result.step, result.names = diagnosis.step, list(diagnosis.names)
        result.ranks, result.tried = list(diagnosis.ranks), list(diagnosis.tried)
    return result, attempt.trace


def _attempt(cell: Cell, setting: Setting, variant: Variant) -> _Attempt:
    """Train one variant on all ranks, and judge it."""
    comm, saved = setting.comm, setting.saved
    task = _task(cell, setting, variant)
    start = None if saved is None else saved.load
    trace = train_traced(task, comm, groups=setting.groups, prepare=setting.prepare, start=start)
    ranks = all_gather_json(comm, [digests_of(step) for step in trace.steps])
    promise = promise_of(cell.strategy)
    if comm.rank and not promise.local:
        return _Attempt(trace)
    evidence = Evidence(
        rank=comm.rank,
        promise=promise,
        reference=Reference(task, comm.world_size, saved),
        trace=trace,
        ranks=ranks,
        start=saved,
    )
    if promise.local:
        options = strategy_options(cell.strategy, uses_all=True)
        verdict = judge_local(evidence, comm, cell.strategy, options)
    else:
        verdict = judge(evidence)
    differences: dict[str, Difference] = {}
    if comm.rank == 0:
        differences = _compare_free_runs(task, evidence, setting, verdict)
        _check_fall(evidence, verdict)
    return _Attempt(trace, verdict, differences, evidence)


def _task(cell: Cell, setting: Setting, variant: Variant) -> Task:
    return Task(
        strategy=cell.strategy,
        model=cell.model,
        dtype=cell.dtype,
        settings=setting.settings,
        variant=variant,
    )


def _compare_free_runs(
    task: Task, evidence: Evidence, setting: Setting, verdict: Verdict
) -> dict[str, Difference]:
    """On rank 0 alone: the same training on one rank, and how far the run lies from it."""
    saved, known = setting.saved, setting.one_rank_runs
    key = (task.model, task.dtype, task.variant, evidence.reference.settings)
    if evidence.promise.kind == "bitwise":
        start = None if saved is None else saved.load
        single = train_traced(task, SingleCommunicator(), start=start)
    elif saved is None:
        if key not in known:
            known[key] = evidence.reference.train()
        single = known[key]
    else:
        single = evidence.reference.train()
    differences = bits(evidence.trace, single)
    if evidence.promise.kind == "bitwise" and verdict.passed:
        found = first_difference(differences)
        verdict.findings += [] if found is None else [found]
    return differences


def _check_fall(evidence: Evidence, verdict: Verdict) -> None:
    """A lossy strategy has no bound to keep, but it must learn."""
    if evidence.promise.kind != "lossy" or not verdict.passed:
        return
    first, last = evidence.trace.steps[0], evidence.trace.steps[-1]
    reference = evidence.reference
    before = reference.loss(first.before, evidence.trace.start_buffers)
    after = reference.loss(last.after, last.buffers)
    if not after < before:
        detail = f"{before:.6g} before the first step, {after:.6g} after the last"
        verdict.findings.append(Finding(kind=Kind.FALL, step=last.number, detail=detail))


def _explain(cell: Cell, setting: Setting, attempt: _Attempt) -> Diagnosis | None:
    """Find the cause on rank 0; the others run the variants that it asks for."""
    comm = setting.comm
    scene = _scene(cell, setting, attempt)
    steps = None if scene is None else diagnose(scene)
    diagnosis: Diagnosis | None = None
    answer: bool | None = None
    while True:
        variant: dict[str, Any] | None = None
        if steps is not None:
            try:
                variant = asdict(next(steps) if answer is None else steps.send(answer))
            except StopIteration as end:
                diagnosis = end.value
        variant = broadcast_json(comm, variant)
        if variant is None:
            return diagnosis
        answer = _attempt(cell, setting, Variant(**variant)).verdict.passed


def _scene(cell: Cell, setting: Setting, attempt: _Attempt) -> Scene | None:
    """The failing step with all ranks' gradients, on rank 0; all ranks call it."""
    comm, evidence, trace = setting.comm, attempt.evidence, attempt.trace
    findings = attempt.verdict.findings
    number = broadcast_json(comm, findings[0].step if findings else None)
    place = next(p for p, step in enumerate(trace.steps) if step.number == number)
    none = dict.fromkeys(trace.trainable)
    gradients = gather_tensors(comm, none | trace.steps[place].gradient)
    previous = gather_tensors(comm, none | (trace.steps[place - 1].gradient if place else {}))
    forward = check_forward(_task(cell, setting, PLAIN), comm, number, setting.saved)
    if comm.rank or evidence is None:
        return None
    results = leaf_results(evidence, place)
    return Scene(
        verdict=attempt.verdict,
        exact=add_up(results),
        results=results,
        documents=[rank[place] for rank in evidence.ranks],
        gradients=gradients,
        previous=previous,
        clip_norm=setting.settings.clip_norm,
        dtype=cell.dtype,
        has_batch_norm=evidence.reference.has_batch_norm,
        local=evidence.promise.local,
        forward=forward,
    )
