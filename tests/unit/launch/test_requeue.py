"""Another turn of a job, or the end of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsync.commands.launch import requeue
from gradsync.commands.launch.requeue import History, Turn, decide, read_turn


def turn(code: int = 75, steps: int | None = 5, seconds: float = 10.0) -> Turn:
    return Turn(code=code, steps=steps, seconds=seconds)


@pytest.mark.parametrize("code", [0, 1, 2, 124, 137])
def test_what_did_not_stop_is_not_requeued(code: int) -> None:
    decision = decide(turn(code), History(steps=1, fruitless=1))
    assert (decision.again, decision.note) == (False, "")


def test_progress_forgives() -> None:
    decision = decide(turn(steps=5), History(steps=4, fruitless=2))
    assert decision.again
    assert decision.history == History(steps=5, fruitless=0)


def test_no_endless_turns() -> None:
    history, again = History(steps=5), []
    for _ in range(3):
        decision = decide(turn(steps=5), history)
        history = decision.history
        again.append(decision.again)
    assert again == [True, True, False]
    assert "3 turn(s) in a row brought no step beyond 5" in decision.note
    assert history == History(steps=5)  # requeued by hand, it has its turns again


@pytest.mark.parametrize(("seconds", "again"), [(1.0, False), (301.0, True)])
def test_without_steps_time_tells(seconds: float, again: bool) -> None:
    decision = decide(turn(steps=None, seconds=seconds), History(fruitless=2))
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


TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
REFUSED = "slurm_requeue error: Requested operation is presently disabled"


@pytest.mark.parametrize(
    ("code", "env", "state", "answer", "asked", "said"),
    [
        (75, {}, "RUNNING", "", "7", "stopped after step 12 with a checkpoint"),
        # The last task's SLURM_JOB_ID is the whole array's.
        (75, TASK, "RUNNING", "", "7_3", "another turn of job 7_3"),
        (0, {}, "RUNNING", "", "", ""),
        (75, {}, "COMPLETING", "", "", "not requeued: job 7 is being ended from outside"),
        (75, {}, "CANCELLED", "", "", "not requeued: job 7 is being ended from outside"),
        (75, {}, "RUNNING", REFUSED, "7", f"not requeued, Slurm says: {REFUSED}"),
        (75, {}, "history is a folder", "", "", "not requeued: cannot write"),
    ],
)
def test_the_end_of_a_turn(
    code: int,
    env: dict[str, str],
    state: str,
    answer: str,
    asked: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Sequence[str]] = []

    def ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        return subprocess.CompletedProcess([], int(bool(answer)), "", answer)

    monkeypatch.setattr(requeue, "ask", ask)
    monkeypatch.setattr(requeue, "state_of", lambda job: state)
    for name, value in ({"SLURM_JOB_ID": "7"} | env).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "summary.json").write_text('{"steps": 12}')
    (tmp_path / "exit.json").write_text(json.dumps({"exit_code": code}))
    history = tmp_path / "turns.json"
    if state == "history is a folder":
        history.mkdir()
    arguments = [f"--history={history}", f"--run-dir={tmp_path}"]
    assert requeue.main(["--status=1", "--seconds=9", *arguments]) == code
    assert calls == ([["scontrol", "requeue", asked]] if asked else [])
    assert said in capsys.readouterr().err
    if code == 0:
        assert not history.exists()
    elif history.is_file():
        assert json.loads(history.read_text()) == {"steps": 12, "fruitless": 0}
