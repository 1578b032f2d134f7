"""A training script that loses ranks, for run.py; it writes down what each rank was dealt and has
committed, and when.

    program.py FOLDER STEPS ON_LOSS SAVE_EVERY WIDTH STOP_AT [KILL …]

STOP_AT: steps to take, at most STEPS; WIDTH: of the model's middle layer. KILL is RANK:STEP:PHASE,
with the number that the launcher gave to the rank; each of them kills once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import gradsync as gs
from gradsync.checkpoint.weights import weights_sha256
from gradsync.core import files
from gradsync.sync import step as steps_of_sync

MICRO_BATCHES = 8
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
"""How often all ranks were started again."""


class Diary:
    """Lines of one process, each with the clock that all processes of a host share."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}-{os.getpid()}.jsonl").open("a")

    def write(self, kind: str, **said: Any) -> None:
        """One line, on disk at once for the kernel: a killed process loses none."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), "start": START, **said})
        self._file.write(line + "\n")
        self._file.flush()


class Killer:
    """Kills this process at a phase of a step, once for all starts of its rank."""

    def __init__(self, folder: Path, name: str, kills: list[str], diary: Diary) -> None:
        self._folder, self._diary = folder, diary
        self._due = {kill.partition(":")[2] for kill in kills if kill.split(":")[0] == name}
        self._name = name

    def at(self, step: int, phase: str) -> None:
        """Die if this is the moment."""
        place = f"{step}:{phase}"
        if place not in self._due:
            return
        mark = self._folder / f"killed-{self._name}-{step}-{phase}"
        if not mark.exists():
            mark.touch()
            self._diary.write("dies", step=step, phase=phase)
            os.kill(os.getpid(), signal.SIGKILL)


def die_inside(killer: Killer, now: list[int], reducer: Any) -> None:
    """Let `killer` act at the phases that have no line in a script."""
    update, reduce = steps_of_sync._clip_and_update, type(reducer).reduce
    rename = files.Filesystem.rename

    def dying_update(*given: Any) -> Any:
        killer.at(now[0], "commit")  # all ranks hold the sums, none has updated
        found = update(*given)
        killer.at(now[0], "update")
        return found

    def dying_reduce(*given: Any) -> Any:
        killer.at(now[0], "reduce")
        return reduce(*given)

    def dying_rename(self: Any, source: Path, target: Path) -> None:
        killer.at(now[0], "save")
        rename(self, source, target)

    steps_of_sync._clip_and_update = dying_update
    type(reducer).reduce = dying_reduce
    files.Filesystem.rename = dying_rename


def build(width: int, total: int, world: gs.World) -> dict[str, Any]:
    """Model, optimizer and loader."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, width)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 4))
    rows = 2 * MICRO_BATCHES * total
    data = TensorDataset(torch.randn(rows, 16), torch.randint(4, (rows,)))
    batches = {"global_batch_size": 2 * MICRO_BATCHES, "micro_batch_size": 2}
    loader = gs.loader(data, world, **batches, num_epochs=1)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loader": loader,
    }


def train(
    sync: gs.GradientSync, parts: dict[str, Any], out: Path, killer: Killer, diary: Diary
) -> bool:
    """Train to the end, or to the step at which a signal asks to stop; returns whether one did."""
    save_every, stop_at = int(sys.argv[4]), int(sys.argv[6])
    model, optimizer, world = parts["model"], parts["optimizer"], sync.world
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    now = [0]
    die_inside(killer, now, sync.reducer)
    done, extra = gs.load(out / "checkpoints", **parts)
    if extra:
        scheduler.load_state_dict(extra["scheduler"])
    diary.write("starts", step=done)
    stop = False
    for batch in parts["loader"]:
        now[0] = done
        for attempt in sync.attempts(batch):
            with attempt:
                generation = world.recovery.generation if world.recovery else 0
                killer.at(done, "data")
                indices = []
                for micro_batch in batch:
                    loss = cross_entropy(model(micro_batch.inputs), micro_batch.targets)
                    killer.at(done, "forward")
                    sync.backward(loss, micro_batch)
                    indices.append(micro_batch.index)
                diary.write("dealt", step=done, generation=generation, indices=indices)
                result = sync.step(optimizer, clip_norm=1.0)
                scheduler.step()
        diary.write("committed", step=done, generation=generation, ranks=world.world_size)
        done += 1
        if done % save_every == 0 or result.rank_waits or result.stop:
            state = {"scheduler": scheduler.state_dict()}
            gs.save(out / "checkpoints", step=done, extra=state, **parts)
            killer.at(done - 1, "saved")
        stop = result.stop
        if stop or done == stop_at:
            break
    whole = sync.state_dict(optimizer)  # ranks may hold parts of the optimizer's state
    states = sorted(whole["optimizer"]["state"].items())
    averages = {str(number): state["exp_avg"] for number, state in states}
    sha256 = weights_sha256((whole["model"] | averages).items())
    diary.write("ends", step=done, sha256=sha256, stopped=stop)
    return stop


def main() -> None:
    """Train as the arguments say."""
    folder, total, on_loss, _, width, _, *kills = sys.argv[1:]
    out, name = Path(folder), os.environ.get("RANK", "0")
    diary = Diary(out, name)
    killer = Killer(out, name, kills, diary)
    more = {"silence_s": float(os.environ.get("SILENCE_S", "1")), "catch_stop": True}
    with gs.init(seed=0, threads=1, on_loss=on_loss, **more) as world:
        parts = build(int(width), int(total), world)
        sync = gs.replicate(parts["model"], world)
        stop = train(sync, parts, out, killer, diary)
        sync.close()
    raise SystemExit(75 if stop else 0)


if __name__ == "__main__":
    main()
