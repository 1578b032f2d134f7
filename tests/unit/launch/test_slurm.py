"""Output of Slurm's commands, and a job that is followed."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsync.errors import LaunchError, RunError
from gradsync.launch import slurm
from gradsync.launch.slurm import (
    JobState,
    Submitted,
    check_job_id,
    copy_new,
    follow,
    jobs_file,
    own_words,
    parse_accounted,
    parse_shown,
    remember,
    remembered,
)

SHOWN = (
    "JobId=12 JobName=xl UserId=me(1) JobState=PENDING "
    "Reason=BeginTime Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 "
    "RunTime=00:00:00 ReqNodeList=n7 NodeList=(null) Command=/a JobState=FAKE"
)


def test_one_line_of_scontrol() -> None:
    state = parse_shown(SHOWN)
    assert (state.job, state.name, state.state) == ("12", "xl", "PENDING")
    assert (state.reason, state.nodes, state.restarts) == ("BeginTime", "", 2)
    assert state.describe() == "PENDING (BeginTime), turn 3"
    assert not state.ended


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "75:0", 75),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("RUNNING", "0:0", 0),
    ],
)
def test_exit_codes(state: str, code: str, expected: int) -> None:
    line = f"JobId=1 JobName=x JobState={state} Reason=None ExitCode={code} NodeList=n1"
    assert parse_shown(line).exit_code == expected
    assert parse_accounted(f"1|x|{state} by 0|{code}|00:01|n1").exit_code == expected


def test_one_line_of_sacct() -> None:
    state = parse_accounted("12|xl|CANCELLED by 1000|0:0|01:00:00|None assigned")
    assert (state.state, state.nodes, state.ended) == ("CANCELLED", "", True)


def test_own_words() -> None:
    text = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job failed: y\n"
    assert own_words(text) == "invalid partition specified: x; Batch job failed: y"
    assert own_words("") == "no reason given"


@pytest.mark.parametrize("text", ["", "x", "1;2", "-1", "1_2", "$(id)"])
def test_no_job_ids(text: str) -> None:
    with pytest.raises(LaunchError, match="is no job id"):
        check_job_id(text)


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on this machine"):
        slurm.submit("job.sbatch")


def answers(monkeypatch: pytest.MonkeyPatch, replies: dict[str, tuple[int, str, str]]) -> None:
    def ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if argv[0] not in replies:
            raise LaunchError("no such command")
        return subprocess.CompletedProcess(argv, *replies[argv[0]])

    monkeypatch.setattr(slurm, "ask", ask)


def test_accounts_know_what_the_controller_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (1, "", "slurm_load_jobs error: Invalid job id specified")
    answers(monkeypatch, {"scontrol": gone, "sacct": (0, "5|x|COMPLETED|0:0|00:01|n1\n", "")})
    assert [each.state for each in slurm.states_of("5")] == ["COMPLETED"]
    answers(monkeypatch, {"scontrol": gone, "sacct": (1, "", "accounting is disabled")})
    assert slurm.states_of("5") == []
    answers(monkeypatch, {"scontrol": gone})
    assert slurm.states_of("5") == []
    answers(monkeypatch, {"scontrol": (1, "", "slurm_load_jobs error: Unable to contact")})
    with pytest.raises(RunError, match="Unable to contact"):
        slurm.states_of("5")


def test_following_a_job(tmp_path: Path) -> None:
    """States when they change, the log as it grows, across a requeue, until the end."""
    log, out, err = tmp_path / "log", io.StringIO(), io.StringIO()
    turns = iter(
        [
            ("PENDING", ""),
            ("PENDING", ""),
            ("RUNNING", "one\n"),
            ("COMPLETING", "two\n"),
            ("PENDING", ""),
            ("RUNNING", "three\n"),
            ("COMPLETED", "four\n"),
        ]
    )
    pauses: list[float] = []

    def states(job: str) -> list[JobState]:
        state, text = next(turns)
        with log.open("a") as file:
            file.write(text)
        return [JobState(job=job, name="x", state=state)]

    last = follow("7", log, out=out, err=err, states=states, pause=pauses.append)
    assert [each.state for each in last] == ["COMPLETED"]
    assert out.getvalue() == "one\ntwo\nthree\nfour\n"
    told = [line.split()[3].strip(",") for line in err.getvalue().splitlines()]
    assert told == ["PENDING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "COMPLETED"]
    assert pauses == [0.5, 0.75, 0.5, 0.5, 0.5, 0.5]


def test_a_forgotten_job(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Slurm has forgotten job 7"):
        follow("7", tmp_path / "log", out=io.StringIO(), states=lambda job: [])


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    assert copy_new(tmp_path / "none", 3, io.StringIO()) == 3


def test_jobs_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    assert remembered() == []
    job = Submitted(job="7", name="x y", script="s", log="l", run_dir="", when="now")
    remember(job)
    with jobs_file().open("a") as file:
        file.write('{"job": 1}\n[]\n{"torn')
    assert remembered() == [job]
