"""`gradsync bench sync --host`: what a step costs the host when computing costs nothing.

The model keeps its number of tensors and buckets and shrinks to a width of 8. A step is then the
work that torch and Python do for it. With a small model, a GPU waits for that work.
"""

from __future__ import annotations

import cProfile
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from gradsync.commands.bench.report import ratios, spread
from gradsync.commands.models.config import GPTConfig

CONTESTANTS = "torch_ddp,bucketed,bucketed:loop=user,invariant,invariant:loop=user"
"""Those of `--strategies default`."""
OPTIONS: Mapping[str, Any] = {"collective": "backend", "overlap_publish": False}
"""By messages, as on GPUs, and whole sums in the step."""
TOKENS = 4
"""Of a sequence."""
_SHOWN = 12
"""Number of functions in a profile."""


def shrunk(shape: GPTConfig) -> GPTConfig:
    """A model with as many tensors, each almost empty."""
    small = {"n_head": 1, "n_kv_head": None, "n_embd": 8, "hidden_dim": 8}
    return replace(shape, **small, vocab_size=64, block_size=16)


def bucket_mb(shape: GPTConfig) -> float:
    """The size at which the shrunk model has as many buckets as the whole one has at 25 MiB."""
    return 25.0 * shrunk(shape).num_params() / shape.num_params()


def count(step: Callable[[], object]) -> dict[str, Any]:
    """What two steps do on this thread: operations that torch dispatches, Python's function calls,
    and the slowest functions, as (name, calls, milliseconds excluding callees)."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operations:
        step()
    recorded: Any = operations.profiler
    # Freeing these events crashes one run in five (torch 2.13, ~ProfilerResult): never free them.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(recorded.kineto_results))
    calls = cProfile.Profile()
    calls.runcall(step)
    found: list[Any] = sorted(calls.getstats(), key=lambda entry: -entry.inlinetime)
    named = [(_name(entry.code), entry.callcount, 1000 * entry.inlinetime) for entry in found]
    return {
        "dispatched": sum(e.name.startswith("aten::") for e in recorded.function_events),
        "calls": sum(entry.callcount for entry in found if not isinstance(entry.code, str)),
        "longest": named[:_SHOWN],
    }


def _name(code: Any) -> str:
    if isinstance(code, str):
        return code.strip("<>").removeprefix("built-in method ").removeprefix("method ")
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}"


LEGEND = (
    "step: each rank's mean over a turn, of these the slowest rank's; median (quartiles) over "
    "rounds. to: the same over that contestant's of the same round. dispatched: operations of "
    "torch, those inside of others too. Python calls: of this thread, rank 0. messages: operations "
    "of the process group, a batch is one."
)


def rows_of(
    seconds: Mapping[str, Sequence[float]], ranks: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, str]]:
    """A row for each contestant, of which the first is `none`, by column.

    Args:
        seconds: each one's step, by round.
        ranks: what rank 0 found for each.
    """
    alone = next(iter(seconds))
    rows, none = [], ranks[alone]["host"]
    for label, own in seconds.items():
        host = ranks[label]["host"]
        beyond = [(host[part] - none[part]) / host["tensors"] for part in ("dispatched", "calls")]
        row = {"contestant": label, "step, ms": spread([1000 * each for each in own]).text(2)}
        for other, name in ((alone, "none"), ("torch_ddp", "torch_ddp")):
            to = spread(ratios(own, seconds[other])).text(2) if other in seconds else "-"
            row[f"to {name}"] = to
        row |= {
            "dispatched": f"{host['dispatched']:,}",
            "Python calls": f"{host['calls']:,}",
            "beyond none, a parameter: dispatched": f"{beyond[0]:.1f}",
            "calls": f"{beyond[1]:.1f}",
            "messages": f"{ranks[label]['operations']:.3g}",
        }
        rows.append(row)
    return rows


def show_profiles(file: IO[str], ranks: Mapping[str, Mapping[str, Any]]) -> None:
    """The functions in which rank 0 spends a step, under the profiler, which slows calls down."""
    for label, found in ranks.items():
        what = f"a step of rank 0 with {found['host']['tensors']} tensors, by the profiler"
        print(f"\n{label}: {what}", file=file)
        for name, calls, milliseconds in found["host"]["longest"]:
            print(f"{milliseconds:9.2f} ms {calls:7,} x  {name}", file=file)
