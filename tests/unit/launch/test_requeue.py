"""Another turn of a job, or the end of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsync.launch import requeue
from gradsync.launch.requeue import History, Turn, decide, read_turn
from gradsync.launch.slurm import JobState


def turn(code: int = 75, steps: int | None = 5, seconds: float = 10.0) -> Turn:
    return Turn(code=code, steps=steps, seconds=seconds)


@pytest.mark.parametrize("code", [0, 1, 2, 124, 137])
def test_what_did_not_stop_is_not_requeued(code: int) -> None:
    decision = decide(turn(code), History(steps=1, fruitless=1), fruitless_turns=3)
    assert (decision.again, decision.note) == (False, "")


def test_progress_forgives() -> None:
    decision = decide(turn(steps=5), History(steps=4, fruitless=2), fruitless_turns=3)
    assert decision.again
    assert decision.history == History(steps=5, fruitless=0)


def test_no_endless_turns() -> None:
    history, again = History(steps=5), []
    for _ in range(3):
        decision = decide(turn(steps=5), history, fruitless_turns=3)
        history = decision.history
        again.append(decision.again)
    assert again == [True, True, False]
    assert "3 turn(s) in a row brought no step beyond 5" in decision.note
    assert history == History(steps=5)  # requeued by hand, it has its turns again


@pytest.mark.parametrize(("seconds", "again"), [(1.0, False), (301.0, True)])
def test_without_steps_time_tells(seconds: float, again: bool) -> None:
    decision = decide(turn(steps=None, seconds=seconds), History(), fruitless_turns=1)
    assert decision.again == again


def test_the_note_counts_more_than_the_status(tmp_path: Path) -> None:
    """torchrun says 1, whatever its ranks said."""
    assert read_turn(tmp_path, 1, 3.0) == Turn(code=1, steps=0, seconds=3.0)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    assert read_turn(tmp_path, 1, 3.0) == Turn(code=75, steps=0, seconds=3.0)
    (tmp_path / "summary.json").write_text('{"steps": 12}')
    assert read_turn(tmp_path, 1, 3.0) == Turn(code=75, steps=12, seconds=3.0)
    for torn in ("", "[]", '{"exit_code": "75"}', "\0"):
        (tmp_path / "exit.json").write_text(torn)
        assert read_turn(tmp_path, 9, 3.0).code == 9


@pytest.mark.parametrize("status", [128 + 10, 128 + 15])
def test_a_signal_before_the_ranks_listened(status: int) -> None:
    assert read_turn(None, status, 1.0) == Turn(code=75, steps=None, seconds=1.0)


class Slurm:
    """Answers of a Slurm, and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, state: str = "RUNNING") -> None:
        self.asked: list[Sequence[str]] = []
        self.about: list[str] = []
        self.answer = subprocess.CompletedProcess([], 0, "", "")
        self.state = state
        monkeypatch.setattr(requeue, "ask", self._ask)
        monkeypatch.setattr(requeue, "states_of", self._states)
        monkeypatch.setenv("SLURM_JOB_ID", "7")

    def _ask(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(argv)
        return self.answer

    def _states(self, job: str) -> list[JobState]:
        self.about.append(job)
        return [JobState(job=job, name="x", state=self.state)]


def end(tmp_path: Path, status: int = 75) -> int:
    (tmp_path / "summary.json").write_text('{"steps": 12}')
    arguments = [f"--history={tmp_path}/turns.json", f"--run-dir={tmp_path}"]
    return requeue.main([f"--status={status}", "--seconds=9", *arguments])


def test_asks_for_another_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(monkeypatch)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    assert end(tmp_path, status=1) == 75
    assert slurm.asked == [["scontrol", "requeue", "7"]]
    assert "stopped after step 12 with a checkpoint" in capsys.readouterr().err
    assert json.loads((tmp_path / "turns.json").read_text()) == {"steps": 12, "fruitless": 0}


def test_a_task_asks_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last task's SLURM_JOB_ID is the whole array's."""
    slurm = Slurm(monkeypatch)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    end(tmp_path)
    assert slurm.asked == [["scontrol", "requeue", "7_3"]]
    assert slurm.about == ["7_3"]


def test_done_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = Slurm(monkeypatch)
    (tmp_path / "exit.json").write_text('{"exit_code": 0}')
    assert end(tmp_path, status=0) == 0
    assert slurm.asked == slurm.about == []
    assert not (tmp_path / "turns.json").exists()


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_what_somebody_ends_is_left_alone(
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slurm = Slurm(monkeypatch, state=state)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    assert end(tmp_path) == 75
    assert slurm.asked == []
    assert "not requeued: job 7 is being ended by somebody else" in capsys.readouterr().err


def test_slurm_may_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(monkeypatch)
    words = "slurm_requeue error: Requested operation is presently disabled"
    slurm.answer = subprocess.CompletedProcess([], 1, "", words)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    assert end(tmp_path) == 75
    assert "Slurm says: slurm_requeue error: Requested" in capsys.readouterr().err


def test_nobody_counts_nobody_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(monkeypatch)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    (tmp_path / "turns.json").mkdir()
    assert end(tmp_path) == 75
    assert slurm.asked == []
    assert "not requeued: cannot write" in capsys.readouterr().err
