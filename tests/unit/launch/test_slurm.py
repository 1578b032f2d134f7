"""Output of Slurm's commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gradsync.commands.launch import slurm
from gradsync.commands.launch.slurm import own_words, state_of
from gradsync.errors import LaunchError


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("JobId=12 JobName=xl UserId=me(1) JobState=PENDING Reason=BeginTime", "PENDING"),
        ("", "gone"),
    ],
)
def test_the_state_of_a_job(line: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ask", lambda argv: subprocess.CompletedProcess(argv, 0, line, ""))
    assert state_of("12") == state


def test_own_words() -> None:
    text = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job failed: y\n"
    assert own_words(text) == "invalid partition specified: x; Batch job failed: y"
    assert own_words("") == "no reason given"


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on this machine"):
        slurm.submit("job.sbatch")
