"""A rank's part of the matrix: job after job on one session, results into a folder.

    FOLDER/work.json                 settings, world size and jobs, written by whoever started us
    FOLDER/done-N.jsonl              a line per job that rank 0 finished, in order
    FOLDER/error-N-rank_00001.json   what a rank raised, and in which job
    FOLDER/checkpoints/              one per cell that is continued by another one

N counts the starts. A rank that raises ends all; whoever started them starts them again behind the
job in which it happened.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradsync.comm.choose import communicator
from gradsync.comm.groups import Groups, groups
from gradsync.runtime.failure import communication_error
from gradsync.runtime.session import Session, SessionOptions
from gradsync.verify.cell import OneRankRuns, Setting, run_cell
from gradsync.verify.plan import Cell, Job, Settings, job_from_json, job_to_json
from gradsync.verify.result import Result
from gradsync.verify.saved import read, save
from gradsync.world import World

WORK = "work.json"


def write_work(folder: Path, number: int, settings: Settings, jobs: Sequence[Job]) -> None:
    """Say what the next start has to do."""
    document = {
        "number": number,
        "settings": asdict(settings),
        "jobs": [job_to_json(job) for job in jobs],
    }
    (folder / WORK).write_text(json.dumps(document))


def run_worker(folder: Path) -> int:
    """Be one rank of one start; 0 when all jobs are done, 1 when this rank noted what it raised.

    Raises:
        whatever comes of opening the session.
    """
    work = json.loads((folder / WORK).read_text())
    settings = Settings(**work["settings"])
    jobs = [job_from_json(job) for job in work["jobs"]]
    noted = None
    try:
        with open_session(settings) as world:
            done = folder / f"done-{work['number']}.jsonl"
            noted = folder / f"error-{work['number']}-rank_{world.rank:05d}.json"
            Worker(settings, world, folder=folder, done=done, noted=noted).run(jobs)
    except Exception:
        if noted is None or not noted.exists():
            raise
        return 1  # whoever started us reads it
    return 0


def open_session(settings: Settings) -> Session:
    """One thread a rank: bits must not depend on how many cores there are."""
    # Said where it matters, by the results; a hundred cells would say it a hundred times.
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return Session(SessionOptions(device="cpu", threads=1, timeout_s=settings.timeout_s))


class Worker:
    """One rank that runs jobs.

    Args:
        settings: of all jobs.
        world: of the session.
        folder: for checkpoints; rank 0's counts.
        done: file that rank 0 adds each result to.
        noted: file for what this rank raises.
    """

    def __init__(
        self, settings: Settings, world: World, *, folder: Path, done: Path, noted: Path
    ) -> None:
        self._settings = settings
        self._world = world
        self._comm = communicator(world)
        self._two_hosts = pretend_two_hosts(world)
        self._folder, self._done, self._noted = folder, done, noted
        self._one_rank_runs: OneRankRuns = {}

    def run(
        self, jobs: Sequence[Job], tell: Callable[[Result], None] = lambda result: None
    ) -> list[Result]:
        """Run all jobs; results are complete on rank 0, where `tell` is called with each.

        Raises:
            whatever a cell raises, once it is written down.
        """
        results = []
        for place, job in enumerate(jobs):
            try:
                result = self._run_job(job)
            except Exception as error:
                self._note(place, error)
                raise
            if self._world.is_main:
                with self._done.open("a") as file:
                    file.write(json.dumps(result.to_json()) + "\n")
                tell(result)
            results.append(result)
        return results

    def _run_job(self, job: Job) -> Result:
        saved, settings = None, self._settings
        if job.source is not None:
            saved = read(self._checkpoint_of(job.source), self._comm)
            if saved.data["global_batch_size"] != settings.global_batch_size:
                # It stands elsewhere in the data: what is left of the pass may not be enough.
                size = settings.dataset_size
                settings = replace(settings, num_samples=size, whole_steps=True)
        setting = Setting(
            settings=settings,
            comm=self._comm,
            groups=self._two_hosts,
            saved=saved,
            one_rank_runs=self._one_rank_runs,
        )
        result, trace = run_cell(job.cell, setting)
        if job.source is not None:
            result.loaded_from = job.source.name
        elif self._world.is_main and len(trace.steps) > 1:
            steps = len(trace.steps) // 2
            save(self._checkpoint_of(job.cell), job.cell.strategy, trace, steps)
        return result

    def _checkpoint_of(self, cell: Cell) -> Path:
        name = f"{cell.strategy}-{cell.world_size}-{cell.model}-{cell.dtype}"
        return self._folder / "checkpoints" / name

    def _note(self, place: int, error: Exception) -> None:
        document = {
            "job": place,
            "rank": self._world.rank,
            "time": time.time(),
            "message": f"{type(error).__name__}: {error}",
            # Written at once, before the session asks the others: it may be ended while it asks.
            "echo": communication_error(error) is not None,
            "traceback": traceback.format_exc(),
        }
        self._noted.write_text(json.dumps(document))


def pretend_two_hosts(world: World) -> Groups:
    """Groups as if the first half of the ranks sat on one host and the rest on another, so that
    `hierarchical` has something to do."""
    size = world.world_size
    first = (size + 1) // 2
    on_second = world.rank >= first
    return groups(
        replace(
            world,
            node_rank=int(on_second),
            num_nodes=min(size, 2),
            local_rank=world.rank - first * on_second,
            local_world_size=size - first if on_second else first,
        )
    )


def read_done(folder: Path, number: int) -> list[dict[str, Any]]:
    """Results of one start, as far as it came."""
    path = folder / f"done-{number}.jsonl"
    text = path.read_text() if path.exists() else ""
    # A rank that was killed while it wrote has left half a line.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_errors(folder: Path, number: int) -> list[dict[str, Any]]:
    """What ranks raised, the first one first; what only tells of a lost peer comes last."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"error-{number}-rank_*.json")]
    return sorted(found, key=lambda entry: (entry["echo"], entry["time"]))
