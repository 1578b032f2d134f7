"""The program of a pool's worker process: one job after the other, from a pipe."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of all its threads to its log."""


@dataclass(frozen=True)
class Job:
    """One rank's part of a call."""

    fn: Callable[..., Any]
    rank: int
    world_size: int
    store_path: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """How a job ended on one rank."""

    result: Any = None
    error: str = ""
    """Empty on success, else a traceback or what happened."""
    reusable: bool = True
    """False when the worker must not get another job."""


def main(jobs: Connection, log_path: str) -> None:
    """Answer one job after the other until the pipe closes."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    import torch
    import torch.distributed

    from support import leaks

    gc.freeze()  # a look for leaks collects, and torch has half a million objects
    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = jobs.recv()  # first: without it the job's function is not found
            job = jobs.recv()
        except EOFError:
            return
        except Exception:  # the function cannot be imported here: the caller wants to know
            jobs.send(Answer(error=traceback.format_exc()))
            continue
        before = leaks.snapshot()
        try:
            answer = pickle.dumps(Answer(_call(job)))
        except Exception:
            answer = pickle.dumps(Answer(error=traceback.format_exc()))
            if torch.distributed.is_initialized():  # a job that fails need not tidy up
                torch.distributed.destroy_process_group()
        if left := leaks.leaks_since(before):
            answer = pickle.dumps(Answer(error=f"the job left behind: {left}", reusable=False))
        # Not `jobs.send`: torch would put tensors into shared memory behind our back.
        jobs.send_bytes(answer)


def _call(job: Job) -> Any:
    try:
        return job.fn(job.rank, job.world_size, job.store_path, *job.args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
