"""The whole matrix: ranks are started once per world size and run all of its cells.

A rank that raises costs its cell, not the others: the ranks are started again behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.errors import RunError
from gradsync.verify.finding import Cause, ranks_text
from gradsync.verify.plan import Cell, Job, Launch, Plan, launches
from gradsync.verify.promise import promise_of
from gradsync.verify.result import Result, result_from_json
from gradsync.verify.worker import read_done, read_errors, write_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one start of ranks ended."""

    code: int
    """Exit code; above 128 for a signal that was meant for all."""
    deaths: Mapping[int, str] = field(default_factory=dict)
    """Ranks that could not say themselves why they ended, and what the launcher says of them."""


StartRanks = Callable[[Path, int], Ended]
"""`start_ranks(folder, world_size)`: run `run_worker(folder)` on so many ranks, wait for them."""


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
            ended = start_ranks(folder, launch.world_size)
            found = _collect(folder, number, launch, left, ended)
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
    folder: Path, number: int, launch: Launch, jobs: Sequence[Job], ended: Ended
) -> list[Result]:
    """Results of one start; the job in which it broke off gets an error."""
    if ended.code > 128:  # also when all jobs were done: who stops this one wants no further one
        raise KeyboardInterrupt
    found = [result_from_json(data) for data in read_done(folder, number)]
    if len(found) == len(jobs):
        return found
    errors = read_errors(folder, number)
    if not errors and not found and ended.code != 1:
        raise RunError(
            f"verify: the {launch.world_size} ranks ended with code {ended.code} at once"
        )
    said, ranks = _blame(errors, ended, launch.world_size)
    return [*found, error_result(jobs[len(found)], said, ranks)]


def _blame(errors: list[dict[str, Any]], ended: Ended, world_size: int) -> tuple[str, list[int]]:
    """Whose failure it was, in words and as ranks.

    That is who was killed; else who first raised something that is not the echo of a lost peer;
    else, when there are only echoes, who left none. The first echo alone names nobody.
    """
    first = errors[0] if errors else None
    raised = "" if first is None else f"rank {first['rank']} raised {first['message']}"
    own = first is not None and not first["echo"]
    if ended.deaths:
        said = [*ended.deaths.values(), *([raised] if own else [])]
        return "; ".join(said), list(ended.deaths)
    if first is None:
        return f"the ranks ended with code {ended.code}", []
    if own:
        return raised, [first["rank"]]
    silent = sorted(set(range(world_size)) - {error["rank"] for error in errors})
    if not silent:
        return raised, []
    who = ranks_text(tuple(silent))
    return f"{who} gave no answer (it hangs, or ended without a word); {raised}", silent


def broken_off(
    found: Sequence[Result], jobs: Sequence[Job], said: str, ranks: Sequence[int]
) -> list[Result]:
    """`found`, an error for the next one of `jobs`, and the rest as not run: for ranks that nobody
    starts again."""
    left = jobs[len(found) :]
    return [
        *found,
        *(error_result(job, said, ranks) for job in left[:1]),
        *(error_result(job, "not run: the ranks had ended") for job in left[1:]),
    ]


def _name(source: Cell | None) -> str:
    return "" if source is None else source.name


def _same_error_twice(results: Sequence[Result]) -> bool:
    """What is wrong with the model or the machine is wrong in every cell: starting ranks again for
    each of them would only take time. Numbers (rank, port, address) may differ, and what other
    ranks saw of it."""
    last = [result.sentence for result in results[-2:] if result.status == "error"]
    gists = [re.sub(r"\d+", "", sentence.partition("; rank ")[0]) for sentence in last]
    return len(gists) == 2 and gists[0] == gists[1] and gists[0].startswith("rank")


def error_result(job: Job, said: str, ranks: Sequence[int] = ()) -> Result:
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
        ranks=list(ranks),
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
