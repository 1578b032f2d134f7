"""The checks for GPUs are sound: over Gloo they hold, and a fault is seen."""

from __future__ import annotations

import pytest
import torch

from gpu import run
from support.launchers import run_python


def test_they_hold_on_a_cpu() -> None:
    plan = [(2, 2, ["plain", "exchanges", "own_loop", "closes", "one_hash"]), (3, 3, ["survives"])]
    rows = run.run_all("cpu", plan, ["exception"])
    assert [row.check for row in rows if not row.held] == [], rows
    assert len(rows) == 8


def test_what_did_not_run_or_differs_is_seen() -> None:
    job = run.Job([1, 1], ['{"check": "plain", "seconds": 1, "found": {}}\nValueError: wrong'])
    held = [(row.check, row.held) for row in run.rows_of(job, ["plain", "closes", "fails"], "2")]
    assert held == [("plain", True), ("closes", False)]
    rows = [run.Row("one_hash", "1", True, found=f"invariant {text}") for text in ("a", "b")]
    assert not run.equal_hashes(rows).held


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = run_python([run.__file__]).ok()
    assert done.stdout.startswith("no GPU here: nothing was run")
    assert done.stdout.count("\n") == 1
