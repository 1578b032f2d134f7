"""Ranks of one host that share memory, one of which is killed at its n-th move; run as a program.

    python killed_ranks.py WORLD_SIZE MOVE[,MOVE...]

For each MOVE it forks that many ranks, lets rank MOVE % WORLD_SIZE kill itself at that move of the
shared-memory protocol, and prints one JSON object: what the survivors said, and when. Forking is
safe here: this process computes nothing, so it has no threads.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # the first optimizer step does, and it takes long
import torch.distributed as dist

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory import ordered_ops, segment
from gradsync.sync.replicate import replicate


def main(world_size: int, moves: list[int]) -> None:
    """One trial per move."""
    for move in moves:
        print(json.dumps(trial(world_size, move)), flush=True)


def trial(world_size: int, move: int) -> dict[str, Any]:
    """Fork the ranks and wait for all of them."""
    victim = move % world_size
    with tempfile.TemporaryDirectory() as folder:
        pids = {_forked(rank, world_size, folder, move, victim): rank for rank in range(world_size)}
        ended: dict[int, tuple[float, int]] = {}
        while len(ended) < world_size:
            pid, status = os.wait()
            ended[pids[pid]] = (time.monotonic(), status)
        said = {}
        for rank in range(world_size):
            path = os.path.join(folder, f"said-{rank}")
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    said[rank] = file.read()
    killed_at, status = ended[victim]
    return {
        "move": move,
        "victim": victim,
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "said": said,
        "survivors_s": max(at for rank, (at, _) in ended.items() if rank != victim) - killed_at,
    }


def _forked(rank: int, world_size: int, folder: str, move: int, victim: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if rank == victim:
            _die_at(move)
        _train(rank, world_size, folder)
        code = 0
    except BaseException as error:
        with open(os.path.join(folder, f"said-{rank}"), "w", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")
    os._exit(code)


def _die_at(move: int) -> None:
    """Count the steps of the protocol, before and after each."""
    count = itertools.count(1)

    def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if next(count) == move:
                os.kill(os.getpid(), signal.SIGKILL)
            result = fn(*arguments, **named)
            if next(count) == move:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    segment.Segment.__init__ = counted(segment.Segment.__init__)
    segment.open_segment = counted(segment.open_segment)
    segment.Segment.close_door = counted(segment.Segment.close_door)
    ordered_ops.Flags.arrive = counted(ordered_ops.Flags.arrive)
    ordered_ops.Flags.finish = counted(ordered_ops.Flags.finish)


def _train(rank: int, world_size: int, folder: str) -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=30)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    sync = replicate(model, comm=ProcessGroupCommunicator(group))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10_000):  # until the end, which comes by another rank's death
        sync.backward(model(torch.ones(4, 64)).sum(), weight=4, reduction="sum")
        sync.step(optimizer, clip_norm=1.0)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(move) for move in sys.argv[2].split(",")])
