"""What `on_loss="shrink"` costs a step without losses.

    torchrun --nproc-per-node 2 benchmarks/on_loss/run.py --out FOLDER

`end` and `shrink` sum over the process group, and differ in the barrier before the update; `shared`
is what `end` does by default on one host: sums in shared memory, and each rank updates a part.
`own` is a loop of the user's, `loss.backward()` and `optimizer.step()`. Contestants take turns in
one process, each on a model of its own; every second round goes backwards.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradsync as gs
from gradsync.commands.bench.experiment import environment, ratios, spread, write_record
from gradsync.commands.models.config import preset
from gradsync.commands.models.gpt import GPT

CONTESTANTS = ("end", "shrink", "end own", "shrink own", "shared")


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-size", default="mini")
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with gs.init(threads=1, seed=0, keep_memory=True, on_loss="shrink") as world:
        config = preset(arguments.model_size)
        ids = torch.randint(config.vocab_size, (1, arguments.context_length + 1))
        ends = replace(world, recovery=None)
        for strategy in ("bucketed", "invariant"):
            contestants = {}
            for name in CONTESTANTS:
                model = GPT(config)
                options = {"collective": "backend"} if name.startswith("end") else {}
                here = world if name.startswith("shrink") else ends
                sync = gs.replicate(model, here, strategy=strategy, **options)
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                contestants[name] = model, sync, optimizer
            for number in range(arguments.rounds + 1):
                for name in list(contestants)[:: 1 if number % 2 else -1]:
                    model, sync, optimizer = contestants[name]
                    dist.barrier()
                    began = time.perf_counter()
                    for _ in range(arguments.steps):
                        logits = model(ids[:, :-1])
                        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                        if name.endswith("own"):
                            loss.backward()
                            optimizer.step()
                            optimizer.zero_grad()
                        else:
                            sync.backward(loss, weight=arguments.context_length)
                            sync.step(optimizer)
                    took = torch.tensor([(time.perf_counter() - began) / arguments.steps])
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    if number:
                        samples.setdefault(f"{strategy} {name}", []).append(1e3 * float(took))
            for _, sync, _ in contestants.values():
                sync.close()
        if not world.is_main:
            return
        for name, found in samples.items():
            strategy, _, way = name.partition(" ")
            of = f"{strategy} end own" if way.endswith("own") else f"{strategy} end"
            ratio = spread(ratios(found, samples[of]))
            print(f"{name:<21}{spread(found).median:8.1f} ms   {ratio.text(3)} of {of}")
        if arguments.out:
            write_record(
                arguments.out,
                name="on_loss",
                command="torchrun --nproc-per-node 2 benchmarks/on_loss/run.py",
                environment=environment(world_size=world.world_size, threads=1),
                data={"settings": {**vars(arguments), "out": ""}, "step_ms": samples},
            )


if __name__ == "__main__":
    main()
