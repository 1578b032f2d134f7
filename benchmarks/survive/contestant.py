"""One rank of a training run that loses rank 1, for scoreboard.py: the same model, data and pace
for torch's DDP, gradsync and torchft.

    contestant.py SIDE FOLDER STEPS ON_LOSS KILL_AT

SIDE: ddp, gradsync or torchft; or lighthouse, torchft's server. Rank 1 kills itself once, in the
middle of step KILL_AT (-1: never). Each rank writes down the steps that it has committed, with the
micro-batches that it gave to them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from gradsync.checkpoint.weights import weights_sha256

SIDE, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS, ON_LOSS, KILL_AT = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
RANKS, MICRO_BATCHES, ROWS, SAVE_EVERY = 3, 12, 4, 10
PAUSE_S = 0.0125
"""For each micro-batch, as an accelerator that computes it: four of them on a rank are 50 ms."""
NAME = int(os.environ.get("REPLICA_GROUP_ID" if SIDE == "torchft" else "RANK", "0"))
# Under shrink and torchft a rank that starts again joins the others, whose count goes on.
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
START = 0 if SIDE == "torchft" or ON_LOSS == "shrink" else RESTARTS
DIARY = (FOLDER / f"{NAME}-{os.getpid()}.jsonl").open("a")


def write(kind: str, **said: Any) -> None:
    """One line, on disk at once for the kernel: a killed process loses none."""
    said |= {"kind": kind, "at": time.monotonic(), "rank": NAME, "start": START}
    DIARY.write(json.dumps(said) + "\n")
    DIARY.flush()


def compute(step: int, place: int) -> None:
    """Take the time of one micro-batch, and die if this is the moment."""
    time.sleep(PAUSE_S)
    mark = FOLDER / "killed"
    if (NAME, step, place) == (1, KILL_AT, 1) and not mark.exists():
        mark.touch()
        write("dies", step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def build() -> tuple[TensorDataset, nn.Module]:
    """Data and model."""
    torch.manual_seed(1)
    rows = STEPS * MICRO_BATCHES * ROWS
    data = TensorDataset(torch.randn(rows, 16), torch.randint(4, (rows,)))
    return data, nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def loss_of(model: nn.Module, data: TensorDataset, step: int, mine: list[int], ranks: int) -> Any:
    """Of a rank's micro-batches; the mean over ranks is that of the whole batch."""
    first = step * MICRO_BATCHES * ROWS
    rows = [first + place * ROWS + row for place in mine for row in range(ROWS)]
    inputs, targets = data[rows]
    whole = cross_entropy(model(inputs), targets, reduction="sum")
    return whole * ranks / (MICRO_BATCHES * ROWS)


def ddp() -> nn.Module:
    """DDP as torch's tutorials have it, with a checkpoint that all ranks load."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks, done = dist.get_rank(), dist.get_world_size(), 0
    data, plain = build()
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = FOLDER / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    while done < STEPS:
        mine = list(range(rank, MICRO_BATCHES, ranks))
        for place in range(len(mine)):
            compute(done, place)
        optimizer.zero_grad()
        loss_of(model, data, done, mine, ranks).backward()
        optimizer.step()
        write("committed", step=done, ranks=ranks, indices=mine)
        done += 1
        if done % SAVE_EVERY == 0 and rank == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": done}, FOLDER / "new.pt")
            (FOLDER / "new.pt").rename(checkpoint)
    dist.destroy_process_group()
    return plain


def gradsync() -> nn.Module:
    """The loop of the guide."""
    import gradsync as gs

    with gs.init(seed=0, threads=1, on_loss=ON_LOSS) as world:
        data, model = build()
        sync = gs.replicate(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = {"global_batch_size": MICRO_BATCHES * ROWS, "micro_batch_size": ROWS}
        loader = gs.loader(data, world, **batches, num_epochs=1)
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        done, _ = gs.load(FOLDER / "checkpoints", **parts)
        for batch in loader:
            for attempt in sync.attempts(batch):
                with attempt:
                    mine = []
                    for place, micro_batch in enumerate(batch):
                        compute(done, place)
                        loss = cross_entropy(model(micro_batch.inputs), micro_batch.targets)
                        sync.backward(loss, micro_batch)
                        mine.append(micro_batch.index)
                    result = sync.step(optimizer)
            write("committed", step=done, ranks=world.world_size, indices=mine)
            done += 1
            if done % SAVE_EVERY == 0 or result.rank_waits:
                gs.save(FOLDER / "checkpoints", step=done, **parts)
        sync.close()
        return model


def torchft() -> nn.Module:
    """train_ddp.py of torchft, dealing each step's batch to the replica groups that take part."""
    import logging

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    logging.basicConfig(level=logging.INFO)
    data, plain = build()

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"train_ddp_{NAME}",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, plain)
    optimizer = Optimizer(manager, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    # All are known to the lighthouse before the first step, so that none begins without the others.
    (FOLDER / f"here-{NAME}").touch()
    while len(list(FOLDER.glob("here-*"))) < RANKS:
        time.sleep(0.01)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        rank, ranks = manager.participating_rank(), manager.num_participants()
        done = manager.current_step()
        mine = list(range(rank or 0, MICRO_BATCHES, ranks))
        for place in range(len(mine)):
            compute(done, place)
        loss_of(model, data, done, mine, ranks).backward()
        optimizer.step()
        if manager.current_step() > done:
            # A group that has only just taken over the weights adds zeros: it has no rank yet.
            indices = [] if rank is None else mine
            write("committed", step=done, ranks=ranks, indices=indices)
    return plain


def lighthouse() -> None:
    """That of torchft, as its README starts it, on the port in TORCHFT_LIGHTHOUSE."""
    from torchft.coordination import LighthouseServer

    port = os.environ["TORCHFT_LIGHTHOUSE"].rpartition(":")[2]
    limits = {"join_timeout_ms": 10_000, "quorum_tick_ms": 100}
    # Its default: a replica group without a heartbeat for 5 s is lost.
    server = LighthouseServer(bind=f"[::]:{port}", min_replicas=1, **limits)
    print(server.address(), flush=True)
    signal.pause()


if __name__ == "__main__":
    if SIDE == "lighthouse":
        lighthouse()
    torch.set_num_threads(1)
    write("starts")
    trained = {"ddp": ddp, "gradsync": gradsync, "torchft": torchft}[SIDE]()
    write("ends", sha256=weights_sha256(trained.state_dict().items()))
