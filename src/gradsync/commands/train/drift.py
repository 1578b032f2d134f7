"""Replicas that differ without a majority: repeating the steps shows which rank was right.

Two ranks with different bits are one against one. But a repeated step gives the same bits, on any
number of ranks (under strategies that promise it), and checkpoints hold weights that all replicas
agreed on if replicas are compared. So the run directory keeps the ranks' hashes, and the run that
resumes from the checkpoint computes the right ones at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsync.commands.train.output import RunDir
from gradsync.core.files import read_object
from gradsync.errors import DriftError
from gradsync.sync.check_model import name_ranks

_FILE = "drift.json"


def keep(run_dir: RunDir, step: int, error: DriftError) -> None:
    """Record what each rank held after `step`."""
    run_dir.write_json(_FILE, {"step": step, "ranks": error.hashes})


def read(folder: Path) -> dict[str, Any]:
    """Document of `keep`: `step`, and by rank the hash of each tensor; {} if it cannot be read."""
    found = read_object(folder / _FILE)
    ranks = found.get("ranks")
    readable = isinstance(ranks, list) and all(isinstance(each, dict) for each in ranks)
    return found if readable and isinstance(found.get("step"), int) else {}


def verdict(found: Mapping[str, Any], hashes: Mapping[str, list[int]]) -> str:
    """Which ranks of `found` held other bits than `hashes`, those of the repeated step."""
    wrong = {
        rank: names
        for rank, theirs in enumerate(found["ranks"])
        if (names := [n for n in hashes if n in theirs and theirs[n] != hashes[n]])
    }
    again = f"step {found['step']}, done again,"
    if len(wrong) in (0, len(found["ranks"])):
        return (
            f"{again} gives no rank's bits of the time when replicas differed: it cannot be said "
            "who was right (several were wrong, or the steps do not repeat: other ranks or "
            "settings under a strategy that needs the same)"
        )
    names = next(iter(wrong.values()))
    share = f"{len(names)} of {len(hashes)} tensors"
    return (
        f"{again} gives other bits than {name_ranks(sorted(wrong))} held, first in {names[0]!r} "
        f"({share}); look at the memory and processor there"
    )
