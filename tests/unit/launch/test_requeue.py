"""Another turn of a job, or the end of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync.commands.launch import requeue
from gradsync.commands.launch.requeue import ask, read_turn
from gradsync.errors import LaunchError, RunError

TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
ASKING = "with a checkpoint; asking Slurm for another turn of job"
GIVEN_UP = "not requeued: 3 turn(s) in a row"
TWICE = {"steps": 5, "fruitless": 2}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Slurm's answers, and the jobs that it was asked to requeue."""
    talk: dict[str, list[str]] = {"state": [" JobState=RUNNING "], "refusal": [], "requeued": []}

    def answer(*argv: str) -> str:
        if argv[1] == "update" and talk["refusal"]:
            raise RunError(f"Slurm refused scontrol: {talk['refusal'][0]}")
        if argv[1] == "update":
            talk["updated"] = [*argv[2:]]
        if argv[1] == "requeue":
            talk["requeued"].append(argv[2])
            if talk["refusal"] and talk["refusal"] != ["the host"]:
                raise RunError(f"Slurm refused scontrol: {talk['refusal'][0]}")
        return talk["state"][0]

    monkeypatch.setattr(requeue, "ask", answer)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return talk


@pytest.mark.parametrize(
    ("steps", "seconds", "before", "said", "after"),
    [
        (12, 1, {}, f"stopped after step 12 {ASKING} 7", {"steps": 12, "fruitless": 0}),
        (6, 1, TWICE, ASKING, {"steps": 6, "fruitless": 0}),
        (5, 999, {"steps": 5, "fruitless": 1}, ASKING, TWICE),
        # Requeued by hand, it has its turns again.
        (5, 999, TWICE, f"{GIVEN_UP} brought no step beyond 5", {"steps": 5, "fruitless": 0}),
        # Without steps, time tells.
        (None, 1, TWICE, f"{GIVEN_UP} ended within 300 s", {"steps": 5, "fruitless": 0}),
        (None, 301, TWICE, f"gradsync: stopped {ASKING} 7", {"steps": 5, "fruitless": 0}),
    ],
)
def test_turns_end_when_nothing_comes_of_them(
    steps, seconds, before, said, after, slurm, tmp_path, capsys
) -> None:
    history = tmp_path / "turns.json"
    history.write_text(json.dumps(before))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": steps}))
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    folder = [] if steps is None else [f"--run-dir={tmp_path}"]
    argv = ["--status=75", f"--seconds={seconds}", f"--history={history}", *folder]
    assert requeue.main(argv) == 75
    assert said in capsys.readouterr().err
    assert json.loads(history.read_text()) == after
    assert slurm["requeued"] == ([] if said.startswith(GIVEN_UP) else ["7"])


def test_lost_hosts_are_left_out_for_some_turns(slurm, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(requeue, "signal", lambda *_: None)
    argv = [f"--history={tmp_path}/h", f"--run-dir={tmp_path}", "--status=1"]
    turns = ["b.cluster,c", "a", "", "d", "", "", "", ""]
    excluded = [",b,c", ",a,b,c", ",a,b,c", ",d,a", ",d", ",d", "", None]
    shown = "z[1-3]"  # the user's own
    for steps, (hosts, left_out) in enumerate(zip(turns, excluded, strict=True)):
        ended = {"exit_code": 1, "lost_hosts": hosts} if hosts else {"exit_code": 75}
        (tmp_path / "exit.json").write_text(json.dumps(ended))
        (tmp_path / "summary.json").write_text(json.dumps({"steps": steps}))
        slurm["state"], slurm["updated"] = [f" JobState=RUNNING ExcNodeList={shown} "], []
        assert requeue.main([*argv, "--seconds=301"]) == ended["exit_code"]
        wanted = [] if left_out is None else ["JobId=7", f"ExcNodeList=z[1-3]{left_out}"]
        assert slurm["updated"] == wanted, capsys.readouterr().err
        shown = f"z[1-3]{left_out}".replace("b,c", "[b-c]")  # as Slurm writes it
    (tmp_path / "exit.json").write_text(json.dumps({"exit_code": 1, "lost_hosts": "d"}))
    assert [requeue.main([*argv, "--seconds=9"]) for _ in range(3)] == [1] * 3
    assert GIVEN_UP in capsys.readouterr().err


def test_a_host_that_slurm_does_not_leave_out(slurm, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(requeue, "signal", lambda *_: None)
    slurm["refusal"] = ["the host"]
    (tmp_path / "exit.json").write_text(json.dumps({"exit_code": 1, "lost_hosts": "b"}))
    argv = ["--status=1", "--seconds=9", f"--history={tmp_path}/h", f"--run-dir={tmp_path}"]
    assert requeue.main(argv) == 1
    assert "gradsync: requeued, but with the lost host(s): " in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 2, 124, 137])
def test_what_did_not_stop_is_not_requeued(code, slurm, tmp_path, capsys) -> None:
    history = tmp_path / "turns.json"
    assert requeue.main([f"--status={code}", "--seconds=9", f"--history={history}"]) == code
    assert (slurm["requeued"], capsys.readouterr().err, history.exists()) == ([], "", False)


@pytest.mark.parametrize(
    ("env", "state", "refusal", "asked", "said"),
    [
        # The last task's SLURM_JOB_ID is the whole array's.
        (TASK, "RUNNING", [], ["7_3"], "another turn of job 7_3"),
        ({}, "COMPLETING", [], [], "not requeued: job 7 is being ended from outside"),
        ({}, "CANCELLED", [], [], "not requeued: job 7 is being ended from outside"),
        ({}, "RUNNING", ["disabled"], ["7"], "not requeued: Slurm refused scontrol: disabled"),
        ({}, "history is a folder", [], [], "not requeued: cannot write"),
    ],
)
def test_the_end_of_a_turn(
    env, state, refusal, asked, said, slurm, monkeypatch, tmp_path, capsys
) -> None:
    slurm["state"], slurm["refusal"] = [f"JobId=7 JobState={state} Reason=None"], refusal
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    history = tmp_path / "turns.json"
    if state == "history is a folder":
        history.mkdir()
    assert requeue.main(["--status=75", "--seconds=999", f"--history={history}"]) == 75
    assert slurm["requeued"] == asked
    assert said in capsys.readouterr().err


def test_the_note_counts_more_than_the_status(tmp_path: Path) -> None:
    """torchrun says 1, whatever its ranks said."""
    assert read_turn(tmp_path, 1) == (1, 0)
    (tmp_path / "exit.json").write_text('{"exit_code": 75}')
    assert read_turn(tmp_path, 1) == (75, 0)
    (tmp_path / "summary.json").write_text('{"steps": 12}')
    assert read_turn(tmp_path, 1) == (75, 12)
    (tmp_path / "exit.json").write_text("")
    assert read_turn(tmp_path, 9) == (9, 0)
    for signal in (10, 15):  # before the ranks listened
        assert read_turn(None, 128 + signal) == (75, None)


def test_what_slurm_refuses_is_said_in_its_words(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho 'error: a' >&2\necho b >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(RunError, match="Slurm refused scontrol: error: a; b"):
        ask("scontrol", "requeue", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on this machine"):
        ask("sbatch", "job")
