"""One cell of the matrix: train, compare, and find the cause if the promise is broken.

All ranks call `run_cell`; rank 0 judges and has the result.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace

import torch

from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.base import Communicator
from gradsync.comm.groups import RankPlacement, SingleCommunicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.commands.verify.compare import Difference
from gradsync.commands.verify.diagnose import Scene, diagnose
from gradsync.commands.verify.judge import Observed, Verdict, gather_tensors, judge, judge_local
from gradsync.commands.verify.record import State, Trace
from gradsync.commands.verify.reference import Reference
from gradsync.commands.verify.result import Kind, Result
from gradsync.commands.verify.run import Prepare, Task, train_traced
from gradsync.commands.verify.settings import Cell, Variant, VerifySettings, promise_of

OneRankRuns = dict[tuple[str, str, Variant, VerifySettings], Trace]
"""Plain one-rank runs, shared by most strategies."""


@dataclass(kw_only=True, slots=True)
class Setting:
    """The environment of a cell, see `train_traced`."""

    settings: VerifySettings
    comm: Communicator
    hosts: RankPlacement | None = None
    prepare: Prepare | None = None
    saved: State | None = None
    one_rank_runs: OneRankRuns = field(default_factory=dict)  # shared by all cells


@dataclass(slots=True)
class _Attempt:
    """One variant of the cell, on one rank; rank 0's is the one that counts."""

    trace: Trace
    run: Observed | None = None  # None on ranks that have nothing to judge
    verdict: Verdict = field(default_factory=Verdict)
    differences: dict[str, Difference] = field(default_factory=dict)  # from one rank's training


def run_cell(cell: Cell, setting: Setting) -> tuple[Result, Trace]:
    """Run one cell; all ranks call it. Returns the result (complete on rank 0), and this rank's
    record of the plain run."""
    started = time.perf_counter()
    task = Task(
        strategy=cell.strategy, model=cell.model, dtype=cell.dtype, settings=setting.settings
    )
    attempt = _attempt(task, setting)
    passed = broadcast_json(setting.comm, attempt.verdict.passed)
    result = Result.of(
        cell,
        status="passed" if passed else "failed",
        bitwise=all(d.bitwise for d in attempt.differences.values()),
        differences={name: asdict(d) for name, d in attempt.differences.items()},
        part_of_bound=attempt.verdict.part_of_bound,
        losses=[step.loss for step in attempt.trace.steps],
        weights_sha256=weights_sha256(attempt.trace.steps[-1].after.weights.items()),
    )
    if not passed:
        _explain(result, task, setting, attempt)
    result.seconds = time.perf_counter() - started
    return result, attempt.trace


def _attempt(task: Task, setting: Setting) -> _Attempt:
    """Train one variant on all ranks, and judge it."""
    comm, saved, known = setting.comm, setting.saved, setting.one_rank_runs
    trace = train_traced(task, comm, hosts=setting.hosts, prepare=setting.prepare, saved=saved)
    ranks = all_gather_json(comm, [step.digests() for step in trace.steps])
    promise = promise_of(task.strategy)
    if comm.rank and not promise.local:
        return _Attempt(trace)
    reference = Reference(task, comm.world_size, saved)
    run = Observed(rank=comm.rank, promise=promise, reference=reference, trace=trace, ranks=ranks)
    verdict = judge_local(run, comm) if promise.local else judge(run)
    if comm.rank:
        return _Attempt(trace, run, verdict)
    # The same training on one rank: by the strategy itself if its bits are promised.
    key = (task.model, task.dtype, task.variant, reference.settings)
    if promise.same_bits:
        alone = train_traced(task, SingleCommunicator(), saved=saved)
    elif saved is not None:
        alone = Reference(task, comm.world_size, saved).train()
    else:
        if key not in known:
            known[key] = Reference(task, comm.world_size).train()
        alone = known[key]
    differences = {part: Difference() for part in ("loss", "gradient", "weight", "state")}
    for a, b in zip(trace.steps, alone.steps, strict=True):
        losses = ({"loss": torch.tensor(step.loss, dtype=torch.float64)} for step in (a, b))
        differences["loss"].include(a.number, *losses)
        differences["gradient"].include(a.number, a.gradient, b.gradient)
        differences["weight"].include(a.number, a.after.weights, b.after.weights)
        differences["state"].include(a.number, a.after.optimizer, b.after.optimizer)
    if verdict.passed and promise.same_bits:
        found = [(d.first_step, n) for n, d in differences.items() if d.first_step is not None]
        if found:
            step, part = min(found, key=lambda entry: entry[0])
            first = differences[part]
            detail = f"{part} differs by {first.max_abs:.3g}"
            verdict.add(Kind.BITS, step, [first.first_name], detail=detail)
    if verdict.passed and promise.kind == "lossy":  # it has no bound, but its loss must fall
        last = trace.steps[-1]
        before, after = reference.loss(trace.steps[0].before), reference.loss(last.after)
        if not after < before:
            detail = f"{before:.6g} before the first step, {after:.6g} after the last"
            verdict.add(Kind.FALL, last.number, detail=detail)
    return _Attempt(trace, run, verdict, differences)


def _explain(result: Result, task: Task, setting: Setting, attempt: _Attempt) -> None:
    """Find the cause on rank 0, from the failing step with all ranks' gradients; the other ranks
    run the variants that it requests."""
    comm, run, trace = setting.comm, attempt.run, attempt.trace
    findings = attempt.verdict.findings
    number = broadcast_json(comm, findings[0].step if findings else None)
    place = next(p for p, step in enumerate(trace.steps) if step.number == number)
    step = trace.steps[place]
    like = {name: step.before.weights[name] for name in trace.trainable}
    gradients = gather_tensors(comm, step.gradient, like)
    previous = gather_tensors(comm, trace.steps[place - 1].gradient if place else {}, like)

    def passes(variant: Variant) -> bool:
        if comm.rank == 0:
            broadcast_json(comm, asdict(variant))
        return _attempt(replace(task, variant=variant), setting).verdict.passed

    if comm.rank or run is None:
        while (variant := broadcast_json(comm)) is not None:
            passes(Variant(**variant))
        return
    scene = Scene(
        verdict=attempt.verdict,
        results=run.results(place),
        documents=run.documents(place),
        gradients=gradients,
        previous=previous,
        dtype=task.dtype,
        has_batch_norm=run.reference.has_batch_norm,
        passes=passes,
        local=run.promise.local,
    )
    result.explain(*diagnose(scene))
    result.tried = scene.tried
    broadcast_json(comm, None)
