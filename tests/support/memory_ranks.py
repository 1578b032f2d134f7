"""Ranks for measuring memory: `python -m support.memory_ranks JSON`, a list of `MemoryRun`s.

Each run gets processes of its own, forked from this one, which has imported torch and computed
nothing: a heap as fresh as after a start, without the seconds that a start takes. Prints a line for
each run, the `peak_bytes` of its ranks as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from gradsync.bench.memory import measure

RANKS = 2
IMPORTED_LATER = ("torch._dynamo", "torch.distributed.fsdp", "torch.utils.checkpoint")
"""By torch itself, a second in each process that trains."""
PR_SET_PDEATHSIG = 1


def main(runs: list[dict[str, Any]]) -> None:
    """Carry out `runs`, one after the other."""
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    for number, run in enumerate(runs):
        job = f"{os.getpid()}-{number}"
        ranks = [_forked(rank, job, run) for rank in range(RANKS)]
        if any(os.waitpid(pid, 0)[1] for pid in ranks):
            sys.exit(1)


def _forked(rank: int, job: str, run: dict[str, Any]) -> int:
    """One rank, as if mpirun had started it; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for prefix in ("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_"):
            os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}SIZE": str(RANKS)}
        os.environ["PMIX_NAMESPACE"] = job
        found = measure(run)
        if rank == 0:
            print(json.dumps(found["peak_bytes"]), flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
