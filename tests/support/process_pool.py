"""Ranks as processes: a session-wide pool of workers that keep what they have imported.

They are forked from a server that has computed nothing, never from the process of the tests: a
child forked after a multi-threaded matmul hangs.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from support import pool_worker, processes
from support.fork_server import CONTEXT
from support.pool_worker import Answer

MAX_WORKERS = 4
FAILURE_GRACE_S = 3.0
"""How long the other ranks may take to notice that one has failed."""


@dataclass
class _Worker:
    process: BaseProcess
    jobs: Connection
    log: Path
    log_start: int = 0
    """Beginning of this job's part of the log, in bytes."""

    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")


class ProcessPool:
    """Up to four worker processes, started when first needed. `close` it at the end."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gs-pool-"))
        self._workers: list[_Worker] = []
        self._num_jobs = 0

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Run `fn(rank, world_size, store_path, *args)` on every rank; results in rank order.

        `fn` is a function of a module, `args` and results are picklable, `store_path` is a fresh
        path for `dist.FileStore` (or `init_method=f"file://{store_path}"`). The job closes its own
        process group. A rank that raises, leaks, dies or hangs fails the test, with its traceback,
        its output and, for a hang, the stacks of all ranks; the pool is rebuilt where it must be.
        """
        assert world_size <= MAX_WORKERS, f"at most {MAX_WORKERS} ranks"
        self._grow(world_size)
        self._num_jobs += 1
        workers = self._workers[:world_size]
        store_path = str(self._folder / f"store-{self._num_jobs}")
        for rank, worker in enumerate(workers):
            worker.log_start = worker.log.stat().st_size
            job = pool_worker.Job(fn, rank, world_size, store_path, args)
            for part in (sys.path, job):
                worker.jobs.send_bytes(pickle.dumps(part))  # why not `send`: see the worker
        answers: dict[int, Answer] = {}
        try:
            self._collect(workers, answers, timeout_s)
        except BaseException:  # the test's own timeout: show here what the ranks were doing
            self._give_up(workers, answers, "the test was interrupted")
            self._discard()
            print(_report(answers, workers), file=sys.stderr)
            raise
        if not all(answer.reusable for answer in answers.values()):
            self._discard()
        if any(answer.error for answer in answers.values()):
            pytest.fail(_report(answers, workers), pytrace=False)
        return [answers[rank].result for rank in range(world_size)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.jobs.close()  # an idle worker leaves by itself
        for worker in self._workers:
            worker.process.join(timeout=2)
        self._discard()
        shutil.rmtree(self._folder)

    def _collect(
        self, workers: list[_Worker], answers: dict[int, Answer], timeout_s: float
    ) -> None:
        """Fill `answers` by rank, in the order in which they come; a dead rank gets an error."""
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(workers):
            open_ranks = {worker.jobs: r for r, worker in enumerate(workers) if r not in answers}
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = any(answer.error for answer in answers.values())
                why = "another rank failed" if failed else f"not done after {timeout_s} s"
                self._give_up(workers, answers, why)
                return
            for connection in ready:
                rank = open_ranks[connection]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    worker = workers[rank].process
                    worker.join(timeout=2)
                    obituary = f"worker died, exit code {worker.exitcode}"
                    answers[rank] = Answer(error=obituary, reusable=False)
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)

    def _give_up(self, workers: list[_Worker], answers: dict[int, Answer], why: str) -> None:
        """Have the silent ranks write their stacks; answer for them."""
        silent = [rank for rank in range(len(workers)) if rank not in answers]
        pids = [workers[rank].process.pid or 0 for rank in silent]
        processes.send(pids, pool_worker.DUMP_SIGNAL)
        time.sleep(0.5)  # faulthandler has no way to say that it is done
        for rank in silent:
            answers[rank] = Answer(error=f"stopped: {why}", reusable=False)

    def _grow(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = CONTEXT.Pipe()
            log = self._folder / f"worker-{time.monotonic_ns()}.log"
            log.touch()
            process = CONTEXT.Process(target=pool_worker.main, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()  # so that we see the end of the pipe when the worker dies
            self._workers.append(_Worker(process, ours, log))

    def _discard(self) -> None:
        """Kill all workers; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.jobs.close()
        self._workers = []


def _report(answers: dict[int, Answer], workers: list[_Worker]) -> str:
    """All failures, in the order in which they came, then what each rank printed."""
    lines = [f"--- rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error]
    for rank, worker in enumerate(workers):
        lines += [f"--- output of rank {rank}", worker.output()]
    return "\n".join(lines)
