"""One rank of `bench memory`: trains one case for a few steps, and looks at its largest size.

[Note: A rank's share] RSS counts a page in every rank that has touched it. Of shared memory the
kernel also tells the proportional size (Pss_Shmem in smaps_rollup), of which all ranks' add up to
what the host holds. It does not shrink while a run lasts; so a rank's peak is its largest resident
size, less what is shared at the end, plus its proportion of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradsync.bench.memory_plan import MemoryRun
from gradsync.bench.record import environment, from_json
from gradsync.bench.sync_run import quiet_session
from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json
from gradsync.models.gpt import loss_sum
from gradsync.train.config import SyncConfig, TrainConfig
from gradsync.train.learner import Learner, autocast, build_learner
from gradsync.world import World

_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
_SOON = {
    "local_sgd": SyncConfig(inner_steps=1),
    "diloco": SyncConfig(inner_steps=1),
    "powersgd": SyncConfig(start_powerSGD_iter=2),
}
"""So that a few steps show what many would."""


def measure(run_json: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a run.

    Returns:
        `environment`, `kind` (cpu or cuda), `keeps_memory`, and `peak_bytes`, one for each rank;
        the same on all ranks.

    Raises:
        GradsyncError: whatever stopped it.
    """
    run = from_json(MemoryRun, run_json)
    with quiet_session(run.device, run.threads, keep_memory=True) as (world, keeps):
        on_cuda = world.device.startswith("cuda")
        found = {
            "environment": environment(world_size=world.world_size, threads=run.threads),
            "kind": "cuda" if on_cuda else "cpu",
            "keeps_memory": keeps,
        }
        learner = _trained(run, world)
        peak = _peak_of_device() if on_cuda else _peak_of_process()
        learner.sync.close()
        by_rank = all_gather_json(communicator(world), {"peak": peak})
    return found | {"peak_bytes": [rank["peak"] for rank in by_rank]}


def _peak_of_process() -> int:
    """See [Note: A rank's share]."""
    private = _kernel(_STATUS, "VmHWM") - _kernel(_STATUS, "RssShmem")
    return private + _kernel(_ROLLUP, "Pss_Shmem")


def _peak_of_device() -> int:
    """The allocator's bytes, and those that the process has beside it (the context, NCCL)."""
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + beside


def _trained(run: MemoryRun, world: World) -> Learner:
    """Steps as the trainer makes them, on random tokens."""
    case = run.case
    config = TrainConfig(
        sync=case.strategy,
        dtype=case.dtype,
        activation_checkpointing=case.checkpointing,
        loss_rows=case.loss_rows,
        model=case.model,
        sync_options=_SOON.get(case.strategy, SyncConfig()),
    )
    learner = build_learner(config, world, case.model, communicator(world))
    sync = learner.sync
    tokens = torch.randint(case.model.vocab_size, (1, case.seq_len), device=world.device)

    def loss() -> torch.Tensor:
        with autocast(config, world):
            if case.loss_rows:
                return sync.forward(tokens, tokens)
            return loss_sum(sync.forward(tokens), tokens)

    sync.prime(lambda: loss().backward())
    for _ in range(run.steps):
        for leaf in range(case.leaves):
            index = world.rank * case.leaves + leaf
            with sync.micro_step(last=leaf == case.leaves - 1, index=index):
                sync.backward(loss(), weight=case.seq_len)
        sync.step(learner.optimizer, clip_norm=config.optim.clip_norm)
    return learner


def _kernel(path: Path, name: str) -> int:
    """A line `NAME: 12 kB` of a file under /proc, in bytes; 0 where there is none."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
