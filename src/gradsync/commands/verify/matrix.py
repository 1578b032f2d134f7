"""Run the whole matrix: ranks start once per world size and run all of its cells.

    FOLDER/work.json                 settings and cells of the next start
    FOLDER/done-N.jsonl              a line per cell that rank 0 finished, in the N-th start
    FOLDER/error-N-rank_00001.json   the error that a rank raised
    FOLDER/checkpoints/              one per cell that is continued by another one

A rank that raises ends all ranks and fails its cell; then they start again."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsync.comm.groups import RankPlacement, communicator
from gradsync.commands.verify.cell import OneRankRuns, Setting, run_cell
from gradsync.commands.verify.result import Cause, Result
from gradsync.commands.verify.run import read, save
from gradsync.commands.verify.settings import Cell, VerifyPlan, VerifySettings, promise_of
from gradsync.errors import RunError
from gradsync.runtime.failure import communication_error
from gradsync.runtime.session import Session, SessionOptions
from gradsync.world import World

WORK = "work.json"
_TIMEOUT_S = 60.0  # longest duration of a collective

Tell = Callable[[Result], None]  # called with each result as soon as it is known


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The end of one start of the ranks."""

    code: int  # exit code; above 128 for a signal to the whole run
    deaths: Mapping[int, str] = field(default_factory=dict)
    """The launcher's words for ranks that could not report why they ended."""


StartRanks = Callable[[Path, int], RunEnd]
"""`start_ranks(folder, world_size)`: run `run_worker(folder)` on `world_size` ranks, and wait."""


def run_matrix(
    plan: VerifyPlan, folder: Path, start_ranks: StartRanks, tell: Tell = lambda result: None
) -> list[Result]:
    """Every cell's result, in the order of work. `RunError` if ranks ended before they began a
    cell, `KeyboardInterrupt` if a signal stopped them."""
    results: list[Result] = []
    number = 0
    for cells in plan.launches:
        broken = {result.name for result in results if result.status == "error"}
        left = []
        for cell in cells:
            if cell.source and cell.source.name in broken:
                results.append(error_result(cell, f"not run: {cell.source.name} failed"))
            else:
                left.append(cell)
        while left:
            asked = [asdict(cell) for cell in left]
            work = {"number": number, "settings": asdict(plan.settings), "cells": asked}
            (folder / WORK).write_text(json.dumps(work))
            ended = start_ranks(folder, cells[0].world_size)
            if ended.code > 128:  # even if all cells are done: no further start is wanted
                raise KeyboardInterrupt
            found = read_done(folder, number)
            if len(found) < len(left):  # the cell in which the ranks stopped
                errors = read_errors(folder, number)
                if not errors and not found and ended.code != 1:
                    raise RunError(f"verify: the ranks ended with code {ended.code} at once")
                found.append(error_result(left[len(found)], *_blame(errors, ended)))
            for result in found:
                tell(result)
            results += found
            left = left[len(found) :]
            number += 1
            if left and _same_error_twice(results):
                said = "not run: the same error came twice"
                results += [error_result(cell, said) for cell in left]
                left = []
    compare_world_sizes(results)
    return results


def _blame(errors: list[dict[str, Any]], ended: RunEnd) -> tuple[str, list[int]]:
    """The failure that ended a start, as text and as ranks: the killed rank's; else the first error
    that is not the echo of a lost peer. An echo alone blames no rank."""
    if ended.deaths:
        return "; ".join(ended.deaths.values()), list(ended.deaths)
    if not errors:
        return f"the ranks ended with code {ended.code}", []
    first = errors[0]
    ranks = [] if first["echo"] else [first["rank"]]
    return f"rank {first['rank']} raised {first['message']}", ranks


def _same_error_twice(results: Sequence[Result]) -> bool:
    """A mistake in the model or the machine appears in every cell: starting ranks again for each
    cell would only take time. Numbers (rank, port, address) may differ, and so may the effects on
    other ranks."""
    last = [result.sentence for result in results[-2:] if result.status == "error"]
    gists = [re.sub(r"\d+", "", sentence.partition("; rank ")[0]) for sentence in last]
    return len(gists) == 2 and gists[0] == gists[1] and gists[0].startswith("rank")


def error_result(cell: Cell, said: str, ranks: Sequence[int] = ()) -> Result:
    """The entry of a cell in which a rank raised or died, or that was not run."""
    return Result.of(cell, status="error", sentence=said, ranks=list(ranks))


def broken_off(
    found: Sequence[Result], cells: Sequence[Cell], said: str, ranks: Sequence[int]
) -> list[Result]:
    """`found`, an error for the next one of `cells`, and the rest as not run: for ranks that do not
    start again."""
    left = cells[len(found) :]
    return [
        *found,
        *(error_result(cell, said, ranks) for cell in left[:1]),
        *(error_result(cell, "not run: the ranks had ended") for cell in left[1:]),
    ]


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
            result.status, result.bitwise, result.cause = "failed", False, Cause.ORDER.value
            result.sentence = (
                f"the final weights are not those of {first.name} (SHA-256 "
                f"{result.weights_sha256[:12]}… instead of {first.weights_sha256[:12]}…)"
            )


def run_worker(folder: Path) -> int:
    """Run one rank of one start; 0 if all cells are done, 1 if this rank recorded its error."""
    work = json.loads((folder / WORK).read_text())
    settings = VerifySettings(**work["settings"])
    cells = [Cell.from_json(cell) for cell in work["cells"]]
    noted = None
    try:
        with open_session() as world:
            noted = _error_file(folder, work["number"], world.rank)
            run_cells(cells, settings, world, folder, number=work["number"])
    except Exception:
        if noted is None or not noted.exists():
            raise
        return 1  # the command that started the ranks reads it
    return 0


def open_session() -> Session:
    """A session with one thread per rank: bits must not depend on the number of cores."""
    # The results report it; a hundred cells would report it a hundred times.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return Session(SessionOptions(device="cpu", threads=1, timeout_s=_TIMEOUT_S))


def run_cells(
    cells: Sequence[Cell],
    settings: VerifySettings,
    world: World,
    folder: Path,
    *,
    number: int = 0,
    tell: Tell = lambda result: None,
) -> list[Result]:
    """Run cells, the same on all ranks, as one rank of a session; record and raise any error.

    Results, errors and checkpoints go to `folder` (rank 0's counts); `number` is the start's. Rank
    0's results are complete, and it reports them.
    """
    comm, two_hosts = communicator(world), pretend_two_hosts(world)
    known: OneRankRuns = {}
    results = []
    for cell in cells:
        setting = Setting(settings=settings, comm=comm, hosts=two_hosts, one_rank_runs=known)
        try:
            result = _run_or_continue(cell, setting, folder)
        except Exception as error:
            note = {
                "rank": world.rank,
                "time": time.time(),
                "message": f"{type(error).__name__}: {error}",
                # Written before the session asks the other ranks: it may be ended meanwhile.
                "echo": communication_error(error) is not None,
                "traceback": traceback.format_exc(),
            }
            _error_file(folder, number, world.rank).write_text(json.dumps(note))
            raise
        if world.is_main:
            with _done_file(folder, number).open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            tell(result)
        results.append(result)
    return results


def _run_or_continue(cell: Cell, setting: Setting, folder: Path) -> Result:
    """Run a cell, from its source's checkpoint if it has a source; otherwise save a checkpoint."""
    begun = cell.source or cell
    checkpoint = f"{begun.strategy}-{begun.world_size}-{begun.model}-{begun.dtype}"
    place = folder / "checkpoints" / checkpoint
    if cell.source is not None:
        setting.saved, settings = read(place, setting.comm), setting.settings
        if setting.saved.data["global_batch_size"] != settings.global_batch_size:
            # Its place in the data differs: the rest of the pass may be too short.
            size = settings.dataset_size
            setting.settings = replace(settings, num_samples=size, whole_steps=True)
    result, trace = run_cell(cell, setting)
    if cell.source is None and setting.comm.rank == 0 and len(trace.steps) > 1:
        save(place, cell.strategy, trace, len(trace.steps) // 2)
    return result


def pretend_two_hosts(world: World) -> RankPlacement:
    """As if the first half of the ranks were on one host and the rest on another, so that
    `hierarchical` has two levels."""
    first = (world.world_size + 1) // 2
    return RankPlacement(tuple(int(rank >= first) for rank in range(world.world_size)))


def _done_file(folder: Path, number: int) -> Path:
    return folder / f"done-{number}.jsonl"


def _error_file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"error-{number}-rank_{rank:05d}.json"


def read_done(folder: Path, number: int = 0) -> list[Result]:
    """Results of one start, up to its end."""
    path = _done_file(folder, number)
    text = path.read_text() if path.exists() else ""
    # A rank that was killed while writing has left half a line.
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Result(**json.loads(line)) for line in whole]


def read_errors(folder: Path, number: int) -> list[dict[str, Any]]:
    """Errors that ranks raised, the first one first; echoes of a lost peer last."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"error-{number}-rank_*.json")]
    return sorted(found, key=lambda entry: (entry["echo"], entry["time"]))
