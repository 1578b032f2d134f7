"""Cost of watching for hangs: the same steps with and without it, in turns, in one run.

    gradsync launch --nproc-per-node 2 -- benchmarks/diagnosis/measure.py mini 40 [auto [STEPS]]

Turns of ten steps (or STEPS) of 512 tokens on each rank, through shared memory where it may (auto)
or by messages (backend); in every other turn no thread samples, publishes or reads what ranks do,
and none looks for stragglers. Prints JSON: milliseconds of a step in each turn (slowest rank), and
the median of the ratios of neighbouring turns with its quartiles. Where the machine is too restless
to show one part in a hundred, these show it: `watch_share`, processor seconds of the watch's thread
by second, and `step_share`, the part of a step spent in looking for stragglers and for nan (waits
for the slowest rank included); the largest of all ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import torch

import gradsync as gs
from gradsync.comm.values import all_gather_json
from gradsync.commands.models.config import PRESETS
from gradsync.commands.models.gpt import GPT, loss_sum

WARM_UP = 2


@contextmanager
def unwatched(session: Any, sync: Any):
    """Without the watch's thread, and without a look for slow ranks."""
    watch, stragglers = session._watch, sync._parts.stragglers
    comm, stragglers._comm = stragglers._comm, None
    watch.stop()
    try:
        yield
    finally:
        stragglers._comm = comm
        stragglers._steps.clear()
        watch._stop = threading.Event()
        watch._thread = threading.Thread(target=watch._run, name="gradsync-watch", daemon=True)
        watch.start()


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Let `spent` hear how long each call of the method `name` takes, seconds."""
    method = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = method(*given, **named)
        spent.append(time.perf_counter() - began)
        return result

    setattr(owner, name, call)


def main() -> None:
    """See the module's docstring."""
    name, rounds = sys.argv[1], int(sys.argv[2])
    collective, steps = (*sys.argv[3:4], "auto")[0], int((*sys.argv[4:], "10")[0])
    session = gs.init(seed=0, threads=1, device="cpu")
    with session as world:
        config = PRESETS[name]
        model = GPT(config, seed=0)
        sync = gs.replicate(model, world, collective=collective)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, config.vocab_size, (1, min(512, config.block_size)))
        tokens = tokens.repeat(512 // tokens.shape[1], 1)

        spent: list[float] = []
        timed(sync._parts.stragglers, "step_ends", spent)
        timed(sync._parts.reducer.non_finite, "look", spent)

        def turn() -> float:
            sync.comm.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                sync.backward(
                    loss_sum(model(tokens), tokens), weight=tokens.numel(), reduction="sum"
                )
                sync.step(optimizer, clip_norm=1.0)
            return (time.perf_counter() - began) / steps * 1e3

        for _ in range(WARM_UP):
            turn()
        mine: list[tuple[float, float]] = []
        watch_s = step_s = 0.0
        for number in range(rounds):
            pair = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                if which:
                    clock = time.pthread_getcpuclockid(session._watch._thread.ident)
                    before = time.clock_gettime(clock)
                    spent.clear()
                    pair[1] = turn()
                    watch_s += time.clock_gettime(clock) - before
                    step_s += sum(spent)
                else:
                    with unwatched(session, sync):
                        pair[0] = turn()
            mine.append((pair[0], pair[1]))
        everyone = all_gather_json(sync.comm, mine)
        watched_s = sum(on for _, on in mine) * steps / 1e3
        shares = all_gather_json(sync.comm, [watch_s / watched_s, step_s / watched_s])
        if world.is_main:
            off, on = (
                [max(rank[i][which] for rank in everyone) for i in range(rounds)]
                for which in (0, 1)
            )
            ratios = [b / a for a, b in zip(off, on, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            spread = [round(x, 4) for x in (low, high)]
            figures = {"model": name, "collective": collective, "rounds": rounds, "steps": steps}
            figures |= {"ratio": round(middle, 4), "quartiles": spread}
            watch, step = (round(max(rank[i] for rank in shares), 5) for i in (0, 1))
            figures |= {"watch_share": watch, "step_share": step}
            figures |= {"off_ms": round(statistics.median(off), 2)}
            figures |= {"on_ms": round(statistics.median(on), 2), "turns_ms": [off, on]}
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
