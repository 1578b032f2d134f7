"""A training script with loader workers that saves when it is asked to stop, for run.py.

program.py FOLDER METHOD        METHOD: fork, spawn or forkserver
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import gradsync as gs


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Rows that take a moment to read."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((8,), row / 1e6), row % 4


def main() -> None:
    """Train until a signal comes."""
    folder, method = Path(sys.argv[1]), sys.argv[2]
    with gs.init(seed=0, threads=1, catch_stop=True) as world:
        model = nn.Linear(8, 4)
        sync = gs.replicate(model, world)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = gs.loader(
            Slow(),
            world,
            global_batch_size=8,
            micro_batch_size=2,
            num_workers=2,
            worker_options={"multiprocessing_context": method},
        )
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        done, _ = gs.load(folder / "checkpoints", **parts)
        for batch in loader:
            for micro_batch in batch:
                loss = cross_entropy(model(micro_batch.inputs), micro_batch.targets)
                sync.backward(loss, micro_batch)
            stop = sync.step(optimizer).stop
            done += 1
            if stop:
                gs.save(folder / "checkpoints", step=done, **parts)
                break
            if done == 3 and world.is_main:
                (folder / "trains").touch()
    raise SystemExit(75 if stop else 0)


if __name__ == "__main__":
    main()
