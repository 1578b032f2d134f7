"""Ranks killed at chosen moves: runs `killed_ranks.py` or its kin and checks what all share."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.fork_server import run_forked


def kill_trials(program: str, world_size: int, moves: Sequence[int]) -> list[dict[str, Any]]:
    """One trial per move: the victim died, all others said something within 5 s, nothing is left.

    Args:
        program: of tests/support, without its ending.
        world_size: ranks of a trial.
        moves: at which a rank kills itself.
    """
    before = sorted(os.listdir("/dev/shm"))
    path = Path(__file__).with_name(f"{program}.py")
    (done,) = run_forked([path, world_size, ",".join(map(str, moves))], timeout_s=100)
    trials = [json.loads(line) for line in done.ok().stdout.splitlines()]
    assert [trial["move"] for trial in trials] == list(moves)
    for trial in trials:
        assert trial["killed"], f"it never came to move {trial['move']}: {trial}"
        assert len(trial["said"]) == world_size - 1, trial
        assert trial["survivors_s"] < 5, trial
    assert sorted(os.listdir("/dev/shm")) == before
    return trials
