"""Run the matrix: ranks start once per world size and run all of its cells.

    FOLDER/work.json        settings and cells of the next start
    FOLDER/results.jsonl    a line per cell, written by rank 0 as soon as it is known
    FOLDER/checkpoints/     one per cell that is continued by another one

An error ends all ranks: its cell has failed, and the rest of this start is not run.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.commands.launch import local
from gradsync.commands.launch.ranks import WORKER, Signals, Stopped, start_ranks
from gradsync.commands.verify.compare import Difference
from gradsync.commands.verify.judge import Observed, Verdict, judge, judge_local
from gradsync.commands.verify.record import State, Trace
from gradsync.commands.verify.reference import Reference
from gradsync.commands.verify.result import Kind, Result
from gradsync.commands.verify.run import Prepare, Task, read, save, train_traced
from gradsync.commands.verify.settings import Cell, VerifyPlan, VerifySettings, promise_of
from gradsync.errors import PeerError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.world import World

_WORK, _RESULTS = "work.json", "results.jsonl"
_TIMEOUT_S = 60.0  # longest duration of a collective
# Launchers end all ranks when the first one fails: give rank 0 time to report.
_SILENCE_S = 2.0


def run_matrix(plan: VerifyPlan, folder: Path, signals: Signals) -> list[Result]:
    """Start ranks here, one world size after another: every cell's result, in the order of work.

    Raises:
        Stopped: a signal came.
    """
    results: list[Result] = []
    for launched in plan.launches:
        broken = {result.name for result in results if result.status == "error"}
        cells = []
        for cell in launched:
            if cell.loaded_from in broken:
                results.append(_error(cell, f"not run: {cell.loaded_from} failed"))
            else:
                cells.append(cell)
        if not cells:
            continue
        work = {"settings": asdict(plan.settings), "cells": [asdict(cell) for cell in cells]}
        (folder / _WORK).write_text(json.dumps(work))
        (folder / _RESULTS).write_text("")
        ended = start_ranks(["verify", WORKER, str(folder)], cells[0].world_size, signals)
        lines = (folder / _RESULTS).read_text().splitlines(keepends=True)
        # A rank that was killed while writing has left half a line.
        made = [Result(**json.loads(line)) for line in lines if line.endswith("\n")]
        said = f"the ranks ended with code {ended.code}; their own lines say why"
        made += _broken_off(cells[len(made) :], said)
        error = next((result for result in made if result.status == "error"), None)
        if ended.killed and error is not None:  # a killed rank could not say why
            deaths = [local.obituary(*each) for each in ended.killed.items()]
            error.sentence, error.ranks = "; ".join(deaths), [*ended.killed]
        results += made
    compare_world_sizes(results)
    return results


def run_worker(folder: Path) -> int:
    """Run one rank of one start; 0 if all cells were run, 1 after an error."""
    work = json.loads((folder / _WORK).read_text())
    cells = [Cell(**cell) for cell in work["cells"]]
    rank = resolve(environ.snapshot()).world.rank
    with Signals() as signals:
        results = run_rank(rank, cells, VerifySettings(**work["settings"]), folder, signals)
    return int(any(result.status == "error" for result in results))


def run_rank(
    rank: int, cells: Sequence[Cell], settings: VerifySettings, folder: Path, signals: Signals
) -> list[Result]:
    """Be rank `rank` of a launch, and run its cells; after an error the rest count as not run. The
    results are complete on rank 0."""
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if rank == 0:
            with (folder / _RESULTS).open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    try:
        signals.check()
        with open_session() as world:
            try:
                for result in run_cells(cells, settings, world, folder):
                    note(result)
                    if world.is_main and sys.stderr.isatty():
                        shown = f"\r\x1b[K{result.status} {result.name}"
                        print(shown, end="\r", file=sys.stderr, flush=True)
            except Exception:
                # The launcher may now end all ranks; first the session asks which rank failed.
                signals.hold()
                raise
    except (Exception, Stopped) as error:
        if signals.received is signal.SIGINT:
            raise
        signals.hold()
        if rank:
            time.sleep(_SILENCE_S)
        for result in _broken_off(cells[len(results) :], *_blame(error, rank)):
            note(result)
    return results


def _blame(error: BaseException, rank: int) -> tuple[str, list[int]]:
    """What ended the ranks, and the rank at fault if it is known."""
    if isinstance(error, PeerError):
        return str(error).partition("\n")[0], [error.rank] if error.rank >= 0 else []
    if isinstance(error, Stopped):
        # A launcher stops a rank when another one has failed: finished work must not be lost.
        return f"rank {rank} was ended by {error}, perhaps as another one failed", []
    return f"rank {rank} raised {type(error).__name__}: {error}", [rank]


def _error(cell: Cell, said: str, ranks: Sequence[int] = ()) -> Result:
    return Result.of(cell, status="error", sentence=said, ranks=list(ranks))


def _broken_off(cells: Sequence[Cell], said: str, ranks: Sequence[int] = ()) -> list[Result]:
    """An error for the first of `cells`, and the rest as not run."""
    rest = [_error(cell, "not run: the ranks had ended") for cell in cells[1:]]
    return [*(_error(cell, said, ranks) for cell in cells[:1]), *rest]


def compare_world_sizes(results: Sequence[Result]) -> None:
    """A tree strategy ends with the same weights at every world size, even if its run was continued
    at another one; a result that does not is marked as failed."""
    wanted: dict[tuple[str, str, str], Result] = {}
    for result in results:
        own = not result.loaded_from or result.loaded_from.startswith(f"{result.strategy} ")
        if not promise_of(result.strategy).same_bits or not own or not result.weights_sha256:
            continue
        first = wanted.setdefault((result.strategy, result.model, result.dtype), result)
        if result.passed and result.weights_sha256 != first.weights_sha256:
            result.status, result.bitwise, result.cause = "failed", False, "order only"
            result.sentence = (
                f"the final weights are not those of {first.name} (SHA-256 "
                f"{result.weights_sha256[:12]}… instead of {first.weights_sha256[:12]}…)"
            )


# -- one cell -------------------------------------------------------------------------------------


def open_session() -> Session:
    """A session with one thread per rank: bits must not depend on the number of cores."""
    # The results report it; a hundred cells would report it a hundred times.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return Session(SessionOptions(device="cpu", threads=1, timeout_s=_TIMEOUT_S))


def run_cells(
    cells: Sequence[Cell], settings: VerifySettings, world: World, folder: Path
) -> Iterator[Result]:
    """Run cells, the same on all ranks, as one rank of a session. Rank 0's results are complete.

    A cell runs from its source's checkpoint if it has a source; otherwise it saves a checkpoint.
    """
    comm = communicator(world)
    for cell in cells:
        place = folder / "checkpoints" / (cell.loaded_from or cell.name)
        saved, own = None, settings
        if cell.loaded_from:
            saved = read(place, comm)
            if saved.data["global_batch_size"] != settings.global_batch_size:
                # Its place in the data differs: the rest of the pass may be too short.
                own = replace(settings, num_samples=settings.dataset_size, whole_steps=True)
        result, trace = run_cell(cell, own, comm, saved)
        if saved is None and world.is_main and len(trace.steps) > 1:
            save(place, cell.strategy, trace, len(trace.steps) // 2)
        yield result


def run_cell(
    cell: Cell,
    settings: VerifySettings,
    comm: Communicator,
    saved: State | None = None,
    prepare: Prepare | None = None,
) -> tuple[Result, Trace]:
    """Train one cell, and judge it; all ranks call it. Returns the result (complete on rank 0), and
    this rank's record of the run."""
    task = Task(
        strategy=cell.strategy, model=cell.model, dtype=cell.dtype, settings=settings, saved=saved
    )
    trace = train_traced(task, comm, prepare)
    ranks = all_gather_json(comm, [step.digests() for step in trace.steps])
    promise = promise_of(cell.strategy)
    verdict, differences = Verdict(), {}
    if comm.rank == 0 or promise.local:
        reference = Reference(task, comm.world_size)
        run = Observed(
            rank=comm.rank, promise=promise, reference=reference, trace=trace, ranks=ranks
        )
        verdict = judge_local(run, comm) if promise.local else judge(run)
        if comm.rank == 0:
            differences = _compare_to_one_rank(run, verdict)
    result = Result.of(
        cell,
        bitwise=all(each.bitwise for each in differences.values()),
        differences={name: asdict(each) for name, each in differences.items()},
        part_of_bound=verdict.part_of_bound,
        losses=[step.loss for step in trace.steps],
        weights_sha256=weights_sha256(trace.steps[-1].after.weights.items()),
    )
    if verdict.findings:
        result.explain(verdict.findings)
    result.status = broadcast_json(comm, result.status)
    return result, trace


def _compare_to_one_rank(run: Observed, verdict: Verdict) -> dict[str, Difference]:
    """Differences from the same training on one rank: by the strategy itself if its bits are
    promised, else in plain PyTorch. Adds what they break to `verdict`."""
    reference, promise = run.reference, run.promise
    if promise.same_bits:
        alone = train_traced(reference.task, SingleCommunicator())
    else:  # a fresh twin: the other one's weights have moved
        alone = Reference(reference.task, len(run.ranks)).train()
    differences = {part: Difference() for part in ("loss", "gradient", "weight", "state")}
    for a, b in zip(run.trace.steps, alone.steps, strict=True):
        losses = ({"loss": torch.tensor(step.loss, dtype=torch.float64)} for step in (a, b))
        differences["loss"].include(a.number, *losses)
        differences["gradient"].include(a.number, a.gradient, b.gradient)
        differences["weight"].include(a.number, a.after.weights, b.after.weights)
        differences["state"].include(a.number, a.after.optimizer, b.after.optimizer)
    if not verdict.findings and promise.same_bits:
        found = [(d.first_step, n) for n, d in differences.items() if d.first_step is not None]
        if found:
            step, part = min(found, key=lambda entry: entry[0])
            first = differences[part]
            detail = f"{part} differs by {first.max_abs:.3g}"
            verdict.add(Kind.BITS, step, [first.first_name], detail=detail)
    if not verdict.findings and promise.kind == "lossy":  # it has no bound, but its loss must fall
        last = run.trace.steps[-1]
        before, after = reference.loss(run.trace.steps[0].before), reference.loss(last.after)
        if not after < before:
            detail = f"{before:.6g} before the first step, {after:.6g} after the last"
            verdict.add(Kind.FALL, last.number, detail=detail)
    return differences
