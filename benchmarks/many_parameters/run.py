"""What the hooks cost: a step of a model with thousands of small parameters.

    torchrun --nproc-per-node 2 benchmarks/many_parameters/run.py --out FOLDER

The model does next to nothing, so the step is what happens per parameter: torch's own backward and
optimizer (`none`), and what synchronisation adds. Contestants take turns step by step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.commands.bench.experiment import environment, ratios, spread, write_record

WIDTH = 64
"""Elements of a parameter."""


class Many(nn.Module):
    """Each parameter is used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)).view_as(x) * x).sum()


def contestants(world: gs.World, count: int) -> dict[str, Callable[[], None]]:
    """By name, one training step each."""
    x = torch.ones(count, WIDTH)

    def plain(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def ours(name: str, **options: str) -> Callable[[], None]:
        model = Many(count)
        sync = gs.replicate(model, world, strategy=name, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            sync.backward(model(x), weight=1.0, reduction="sum")
            sync.step(optimizer)

        return step

    return {
        "none": plain(Many(count)),
        "torch_ddp": plain(DistributedDataParallel(Many(count), gradient_as_bucket_view=True)),
        "invariant": ours("invariant"),
        "bucketed": ours("bucketed"),
        "invariant by messages": ours("invariant", collective="backend"),
        "bucketed by messages": ours("bucketed", collective="backend"),
    }


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with gs.init(threads=1) as world:
        steps = contestants(world, arguments.parameters)
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(arguments.rounds + 3):
            for name, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                step()
                slowest = torch.tensor([time.perf_counter() - began])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if number >= 3:  # the first ones lay things out
                    samples[name].append(float(slowest))
        if world.is_main:
            for name, seconds in samples.items():
                step_s, ratio = spread(seconds), spread(ratios(seconds, samples["torch_ddp"]))
                print(
                    f"{name:<24}{1e3 * step_s.median:7.1f} ms"
                    f"   {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) of torch_ddp"
                )
            if arguments.out:
                write_record(
                    arguments.out,
                    name="many_parameters",
                    command="torchrun --nproc-per-node 2 benchmarks/many_parameters/run.py",
                    environment=environment(world_size=world.world_size, threads=1),
                    data={"parameters": arguments.parameters, "step_s": samples},
                )


if __name__ == "__main__":
    main()
