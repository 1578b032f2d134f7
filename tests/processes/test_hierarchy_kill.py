"""Kill -9 of a rank on one of two hosts: its own host and the other one say so within seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "killed_hosts.py"
MOVES = (1, 38, 97)
"""The first segment being made, the first buckets, the middle of training; on both hosts."""


@pytest.mark.timeout(60)
def test_moments_of_all_kinds() -> None:
    before = sorted(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "4", ",".join(map(str, MOVES))],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert [trial["move"] for trial in trials] == list(MOVES)
    for trial in trials:
        assert trial["killed"], f"it never came to move {trial['move']}: {trial}"
        assert len(trial["said"]) == 3, trial
        assert trial["survivors_s"] < 5, trial
    assert sorted(os.listdir("/dev/shm")) == before
