"""A rank that trains for two steps and measures its largest size; `test_memory_measured` starts it.

The one argument is a folder: it has case.json, and gets the ranks' bytes as peaks.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json
from gradsync.commands.bench.entrants import micro_batches_of
from gradsync.commands.bench.steps import quiet_session
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.learner import build_learner


def peak_bytes() -> int:
    """The largest resident size, of what is shared a proportion (it does not shrink while a run
    lasts)."""
    sizes: dict[str, int] = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            what, _, value = line.partition(":")
            if value.endswith("kB"):
                sizes[what] = int(value.split()[0]) * 1024
    return sizes["VmHWM"] - sizes["RssShmem"] + sizes["Pss_Shmem"]


def main(folder: Path) -> None:
    """Steps as the trainer makes them, on one leaf of random tokens."""
    case = json.loads((folder / "case.json").read_text())
    model, tokens = GPTConfig(**case.pop("model")), case.pop("tokens")
    config = TrainConfig(**case, model=model)
    with quiet_session("cpu", 1) as world:
        learner = build_learner(config, world, model, communicator(world))
        learner.prime((1, tokens))
        batch = torch.randint(model.vocab_size, (2, 1, tokens)).unbind()
        leaves = micro_batches_of([batch], world)
        for _ in range(2):  # the first makes the optimizer's state
            learner.run_micro_batches(leaves)
            learner.sync.step(learner.optimizer, clip_norm=config.optim.clip_norm)
        peak = peak_bytes()
        learner.sync.close()
        peaks = all_gather_json(communicator(world), {"peak": peak})
        if world.is_main:
            (folder / "peaks.json").write_text(json.dumps([rank["peak"] for rank in peaks]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
