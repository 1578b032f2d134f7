"""What saving costs a run: so many steps with one checkpoint, all of them counted.

    torchrun --nproc-per-node 2 benchmarks/saving/run.py --out FOLDER

A turn is one checkpoint and the steps after it. It ends when the steps are done and the checkpoint
is written: `async` writes during the steps, `sync` before them, `none` not at all. Contestants take
turns in one process, on the same model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradsync as gs
from gradsync.commands.bench.experiment import environment, ratios, spread, write_record
from gradsync.commands.models.config import preset
from gradsync.commands.models.gpt import GPT

CONTESTANTS = ("none", "async", "sync")


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-size", default="mini")
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with (
        gs.init(threads=1, seed=0, keep_memory=True) as world,
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,  # a disk, not memory
    ):
        config = preset(arguments.model_size)
        model = GPT(config)
        sync = gs.replicate(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(config.vocab_size, (1, arguments.context_length + 1))
        samples: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        waits: list[float] = []
        for number in range(arguments.rounds + 1):
            for name in CONTESTANTS:
                dist.barrier()
                began = time.perf_counter()
                if name != "none":
                    gs.save(folder, step=number, model=model, optimizer=optimizer, keep_last=1)
                    if name == "sync":
                        for writer in sync.writers.values():
                            writer.wait()
                        dist.barrier()
                saved_s = time.perf_counter() - began
                for _ in range(arguments.steps if number else 3):  # the first lays things out
                    logits = model(ids[:, :-1])
                    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                    sync.backward(loss, weight=arguments.context_length)
                    sync.step(optimizer)
                for writer in sync.writers.values():
                    writer.wait()
                took = torch.tensor([time.perf_counter() - began, saved_s])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number:
                    samples[name].append(float(took[0]))
                    waits += [float(took[1])] if name == "async" else []
        sync.close()
        if not world.is_main:
            return
        for name, seconds in samples.items():
            ratio = spread(ratios(seconds, samples["none"]))
            print(f"{name:<8}{spread(seconds).median:7.1f} s   {ratio.text(3)} of none")
        print(f"the step that saves waits {spread(waits).median:.3f} s (async)")
        if arguments.out:
            write_record(
                arguments.out,
                name="saving",
                command="torchrun --nproc-per-node 2 benchmarks/saving/run.py",
                environment=environment(world_size=world.world_size, threads=1),
                data={
                    "settings": {**vars(arguments), "out": ""},
                    "run_s": samples,
                    "wait_s": waits,
                },
            )


if __name__ == "__main__":
    main()
