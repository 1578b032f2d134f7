"""What an unmodified program gains by torch's backend `shm`: its all-reduce beside gloo's.

    torchrun --nproc-per-node 2 benchmarks/shm_backend/run.py --out FOLDER

25 MiB is DDP's bucket. Called as DDP calls it: `async_op=True`, then `wait`. Both backends take
turns in the same processes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gradsync.backends  # noqa: F401  registers "shm"
from gradsync.bench.experiment import environment, write_record
from gradsync.bench.report import ratios, spread

SIZES_MIB = (1, 25, 64)


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("shm")  # registered by the import above
    gloo = dist.new_group(backend="gloo")
    samples: dict[str, dict[str, list[float]]] = {}
    for mib in SIZES_MIB:
        tensor = torch.ones(mib * 2**20 // 4)
        found: dict[str, list[float]] = {"shm": [], "gloo": []}
        for number in range(arguments.rounds + 3):
            for name, group in (("shm", None), ("gloo", gloo)):
                dist.barrier(group=gloo)
                began = time.perf_counter()
                dist.all_reduce(tensor, group=group, async_op=True).wait()
                slowest = torch.tensor([time.perf_counter() - began])
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group=gloo)
                tensor.fill_(1.0)
                if number >= 3:
                    found[name].append(float(slowest))
        samples[f"{mib} MiB"] = found
    if dist.get_rank() == 0:
        for size, found in samples.items():
            gain = spread(ratios(found["gloo"], found["shm"]))
            times = {name: spread(seconds).median for name, seconds in found.items()}
            print(
                f"{size:>7}  shm {1e3 * times['shm']:6.2f} ms  gloo {1e3 * times['gloo']:6.2f} ms"
                f"  gloo / shm {gain.median:.1f} ({gain.low:.1f}-{gain.high:.1f})"
            )
        if arguments.out:
            write_record(
                arguments.out,
                name="shm_backend",
                command="torchrun --nproc-per-node 2 benchmarks/shm_backend/run.py",
                environment=environment(world_size=dist.get_world_size(), threads=1),
                data={"seconds": samples},
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
