"""Which files of gradsync one training step executes: the length of the walk from loss to weights.

    python tools/trace_step.py [--transport shared_memory|gloo] [--loop handle|own] [--at-most N]

Two ranks, each a process, train a small model with the default strategy: two steps to warm up (the
first one lays buckets out), then one under a profiler. Prints the files of the package that ran on
any rank, and how often something in each of them was called, the most called first. `--loop own`
takes a loop without the handle's `backward` and `step`. Exit code 1 when there are more
files than `--at-most`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

NUM_RANKS = 2
LEAVES = 2
"""Micro-batches of a rank's step."""
OPTIONS = {"shared_memory": "shared_memory", "gloo": "backend"}
"""By transport: the strategy's option `collective`."""
_BESIDE = "gradsync-watch"
"""The thread that looks after other ranks a few times a second, step or not."""


class MicroBatch(NamedTuple):
    """The part of a micro-batch that the handle reads; loaders are no part of the step."""

    index: int
    is_last: bool
    num_targets: int


class Tracer:
    """Counts calls of functions that lie under `folder`, by file, while `counting` encloses them.

    Make it before threads start: Python hands its profiler to new threads only.

    Args:
        folder: of the package.
    """

    def __init__(self, folder: Path) -> None:
        self.calls: Counter[str] = Counter()
        self._folder = f"{folder}/"
        self._counts = False
        threading.setprofile(self._profile)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is called from here on, in this thread and in those started before."""
        self._counts = True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._counts = False

    def join(self, _: Any) -> None:
        """Count in the calling thread too: a gradient's hook; autograd has its own threads."""
        if self._counts:
            sys.setprofile(self._profile)

    def close(self) -> None:
        """New threads are not profiled any more."""
        threading.setprofile(None)  # pyrefly: ignore[bad-argument-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self._counts or not file.startswith(self._folder):
            return
        if threading.current_thread().name != _BESIDE:
            self.calls[file.removeprefix(self._folder)] += 1


def be_rank(transport: str, loop: str, folder: Path) -> None:
    """Train, and leave the counts in `folder`."""
    import gradsync

    tracer = Tracer(Path(gradsync.__file__).parent)
    import torch
    from torch import nn

    with gradsync.init(seed=0, threads=1, device="cpu") as world:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        sync = gradsync.replicate(model, world, collective=OPTIONS[transport])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.register_hook(tracer.join)
        inputs = torch.randn(LEAVES, 3, 8)
        step = _step if loop == "handle" else _own_step
        for _ in range(5):  # the first micro-batches check the form of the loss
            step(sync, model, optimizer, inputs)
        with tracer.counting():
            step(sync, model, optimizer, inputs)
        (folder / f"{world.rank}.json").write_text(json.dumps(tracer.calls))
        sync.close()


def _step(sync: Any, model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    for number, inputs_BC in enumerate(inputs):
        index = sync.comm.rank * LEAVES + number
        leaf = MicroBatch(index, is_last=number == LEAVES - 1, num_targets=len(inputs_BC))
        sync.backward(model(inputs_BC).square().sum(), leaf, reduction="sum")
    sync.step(optimizer, clip_norm=1.0)


def _own_step(sync: Any, model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    *first, last = inputs
    for inputs_BC in first:
        with sync.no_sync():
            model(inputs_BC).square().mean().backward()
    model(last).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def launch(words: list[str]) -> None:
    """Run `python WORDS` on each rank; CalledProcessError: a rank failed."""
    command = [sys.executable, "-m", "gradsync", "launch", f"--nproc-per-node={NUM_RANKS}", "--"]
    subprocess.run([*command, *words], check=True)


def trace(
    transport: str, loop: str, launch: Callable[[list[str]], object] = launch
) -> Counter[str]:
    """Calls by file, the sum over ranks; `launch` runs `python WORDS` on each of them."""
    with tempfile.TemporaryDirectory() as folder:
        launch([__file__, "--transport", transport, "--loop", loop, "--rank-in", folder])
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == NUM_RANKS, "every rank leaves its counts"
    return sum(map(Counter, found), Counter())


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", choices=OPTIONS, default="shared_memory")
    parser.add_argument("--loop", choices=("handle", "own"), default="handle")
    parser.add_argument("--at-most", type=int)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        be_rank(options.transport, options.loop, options.rank_in)
        return 0
    calls = trace(options.transport, options.loop)
    for file, count in calls.most_common():
        print(f"{count:>6}  {file}")
    print(f"{len(calls)} files ({options.transport}, loop: {options.loop}, {NUM_RANKS} ranks)")
    return int(options.at_most is not None and len(calls) > options.at_most)


if __name__ == "__main__":
    raise SystemExit(main())
