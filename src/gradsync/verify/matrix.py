"""The whole matrix: ranks are started once per world size and run all of its cells.

A rank that raises costs its cell, not the others: the ranks are started again behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gradsync.errors import RunError
from gradsync.verify.finding import Cause
from gradsync.verify.plan import Cell, Job, Launch, Plan, launches
from gradsync.verify.promise import promise_of
from gradsync.verify.result import Result, result_from_json
from gradsync.verify.worker import read_done, read_errors, write_work

StartRanks = Callable[[Path, int], int]
"""`start_ranks(folder, world_size) -> exit code`: run `run_worker(folder)` on so many ranks."""


def run_matrix(
    plan: Plan,
    folder: Path,
    start_ranks: StartRanks,
    tell: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Every cell's result, in the order of work.

    Args:
        plan: what to run.
        folder: for results and checkpoints, of this run alone.
        start_ranks: starts the ranks and waits for them.
        tell: called with the results of each start.

    Raises:
        RunError: ranks ended without having begun a job.
        KeyboardInterrupt: the ranks were stopped by a signal.
    """
    results: list[Result] = []
    number = 0
    for launch in launches(plan):
        broken = {result.name for result in results if result.status == "error"}
        left = tuple(job for job in launch.jobs if _name(job.source) not in broken)
        lost = [job for job in launch.jobs if _name(job.source) in broken]
        results += [error_result(job, f"not run: {_name(job.source)} failed") for job in lost]
        while left:
            write_work(folder, number, plan.settings, left)
            code = start_ranks(folder, launch.world_size)
            found = _collect(folder, number, launch, left, code)
            for result in found:
                tell(result)
            results += found
            left = left[len(found) :]
            number += 1
            if left and _same_error_twice(results):
                skipped = [error_result(job, "not run: the same error came twice") for job in left]
                results += skipped
                left = ()
    compare_world_sizes(results)
    return results


def _collect(
    folder: Path, number: int, launch: Launch, jobs: Sequence[Job], code: int
) -> list[Result]:
    """Results of one start; the job in which it broke off gets an error."""
    found = [result_from_json(data) for data in read_done(folder, number)]
    if len(found) == len(jobs):
        return found
    if code == 130 or code > 128:
        raise KeyboardInterrupt
    errors = read_errors(folder, number)
    if not errors and not found and code != 1:
        raise RunError(f"verify: the {launch.world_size} ranks ended with code {code} at once")
    said = f"the ranks ended with code {code}"
    if errors:
        said = f"rank {errors[0]['rank']} raised {errors[0]['message']}"
    return [*found, error_result(jobs[len(found)], said)]


def _name(source: Cell | None) -> str:
    return "" if source is None else source.name


def _same_error_twice(results: Sequence[Result]) -> bool:
    """What is wrong with the model or the machine is wrong in every cell: starting ranks again for
    each of them would only take time."""
    last = [(result.status, result.sentence.partition(" raised ")[2]) for result in results[-2:]]
    return len(last) == 2 and last[0] == last[1] and last[0][0] == "error" and last[0][1] != ""


def error_result(job: Job, said: str) -> Result:
    """The entry of a job in which a rank raised or died, or that was not run."""
    return Result(
        strategy=job.cell.strategy,
        world_size=job.cell.world_size,
        model=job.cell.model,
        dtype=job.cell.dtype,
        promise=promise_of(job.cell.strategy).kind,
        loaded_from="" if job.source is None else job.source.name,
        status="error",
        sentence=said,
    )


def compare_world_sizes(results: Sequence[Result]) -> None:
    """A bitwise strategy ends with the same weights at every world size, also when a run of its own
    was continued at another one; who does not is marked as failed."""
    wanted: dict[tuple[str, str, str], Result] = {}
    for result in results:
        own = not result.loaded_from or result.loaded_from.startswith(f"{result.strategy} ")
        if result.promise != "bitwise" or not own or not result.weights_sha256:
            continue
        first = wanted.setdefault((result.strategy, result.model, result.dtype), result)
        if result.passed and result.weights_sha256 != first.weights_sha256:
            result.status = "failed"
            result.bitwise = False
            result.cause = Cause.ORDER.value
            result.sentence = (
                f"the final weights are not those of {first.name} (SHA-256 "
                f"{result.weights_sha256[:12]}… instead of {first.weights_sha256[:12]}…)"
            )
