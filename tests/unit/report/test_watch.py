"""`gradsync watch`: what a run's directory gains is told once, and the run is left alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from gradsync.commands.cli.main import main
from gradsync.commands.report import watch as command
from gradsync.commands.report.page import page
from gradsync.commands.report.run import RANKS_HEAD, read_ranks, read_run
from gradsync.commands.report.watch import Follower, follow

FAILED = {"exit_code": 1, "reason": "failed", "error": "rank 1 vanished"}


def record(step: int, **fields: object) -> dict[str, object]:
    return {
        "step": step,
        "train/loss": 4.0 / step,
        "perf/tokens_per_s": 12_345.6,
        "perf/step_s": 2.0,
        **fields,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 100 steps that has done two."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text("steps: 100\nlog_every: 1\n")
    (path / "env.json").write_text('{"world_size": 2}')
    (path / "logs" / "rank_00001.log").write_text("10:00 INFO started\n10:01 WARNING slow\n")
    add(path, record(1), record(2))
    (path / "starts.jsonl").write_text('{"step": 0, "world_size": 2}\n')
    return path


def add(path: Path, *records: object) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)


def end(path: Path, code: int = 0, **fields: object) -> None:
    document = {"exit_code": code, "reason": "done", **fields}
    (path / "exit.json").write_text(json.dumps(document))


def watched(run: Path, *happenings: Callable[[], object], stream: io.StringIO) -> int:
    """The watch's exit code where these things happen, one after each look."""
    due = iter(happenings)

    def happen() -> None:
        next(due)()

    return follow(Follower(run), stream, happen)


def test_each_record_is_a_line_on_a_pipe(run: Path) -> None:
    def torn() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "train')

    def whole() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('/loss": null}\nno json\n[1]\n')

    stream = io.StringIO()
    code = watched(
        run,
        lambda: add(run, record(3), record(4), {"step": 4, "val/loss": 0.5}),
        lambda: (run / "checkpoints" / "step-00000004").mkdir(parents=True),
        torn,
        whole,
        lambda: (run / "logs" / "rank_00000.log").write_text("11:00 ERROR \x1b[31mred\n"),
        lambda: end(run, 75, reason="stopped by SIGTERM"),
        stream=stream,
    )
    assert code == 75
    assert stream.getvalue().splitlines() == [
        "step 2/100  loss 2.0000  12,346 tok/s in all  eta 0:03:16",  # the newest of the first look
        "rank 1: 10:01 WARNING slow",
        "step 3/100  loss 1.3333  12,346 tok/s in all  eta 0:03:14",
        "step 4/100  loss 1.0000  12,346 tok/s in all  eta 0:03:12",
        "step 4: validation loss 0.5000",
        "checkpoint of step 4",
        "step 5/100  loss ?",
        "rank 0: 11:00 ERROR \\x1b[31mred",
        "the run has ended: stopped by SIGTERM",
    ]


def test_a_run_that_starts_again_is_told_from_there(run: Path) -> None:
    held_out = {"step": 2, "val/loss": 0.75}
    add(run, held_out)

    def start_again() -> None:
        with (run / "starts.jsonl").open("a") as file:
            file.write('{"step": 2, "world_size": 1}\n')
        (run / "config.yaml").write_text("steps: 50\n")
        (run / "env.json").write_text('{"world_size": 1}')
        fresh = run.parent / "fresh"
        fresh.mkdir()
        add(fresh, record(1), record(2), held_out, record(3, more="x" * 1000))
        os.replace(fresh / "metrics.jsonl", run / "metrics.jsonl")

    stream = io.StringIO()
    code = watched(
        run,
        lambda: add(run, record(3), record(4)),
        start_again,
        lambda: add(run, record(4)),
        lambda: end(run, 1, **{k: v for k, v in FAILED.items() if k != "exit_code"}),
        stream=stream,
    )
    assert code == 1
    told = [line.partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert told == [
        *("step 2/100", "step 2: validation loss 0.7500", "rank 1: 10:01 WARNING slow"),
        *("step 3/100", "step 4/100", "started again from step 2 with 1 rank"),
        *("step 3/50", "step 4/50"),
        "the run has ended: exit code 1: failed, rank 1 vanished",
    ]


def test_a_terminal_has_a_panel(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    table(run, WAITS, LATE)
    stream = Terminal()
    assert watched(run, lambda: end(run), stream=stream) == 0
    for row in ("train.py:1", "61.2 s", "last record"):
        assert row in stream.getvalue()


def test_a_run_whose_environment_is_not_known(run: Path) -> None:
    (run / "env.json").unlink(missing_ok=True)
    assert "? ranks" in page(read_run(run))
    stream = io.StringIO()
    assert watched(run, lambda: end(run), stream=stream) == 0


def table(run: Path, *ranks: dict[str, object], age_s: float = 0.0) -> None:
    document = {"time": time.time() - age_s, "every_s": 1.0, "ranks": list(ranks)}
    (run / "ranks.json").write_text(json.dumps(document))


LATE = {"rank": 1, "step": 2, "steps_per_s": 0.5, "phase": "computes", "waited": 0.0625}
LATE |= {"where": "data.py:7 \x1b[2J", "lag_s": 61.25}
WAITS = {**LATE, "rank": 0, "phase": "waits", "waited": 0.9, "where": "train.py:1", "lag_s": 0.0}


def test_all_ranks_are_shown_with_step_rate_phase_and_lag(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(run, WAITS, LATE)
    rows, fresh = read_ranks(run)
    assert fresh
    assert rows == [
        ("0", "2", "0.50", "waits", "90 %", "", "train.py:1"),
        ("1", "2", "0.50", "computes", "6 %", "61.2 s", "data.py:7 \\x1b[2J"),
    ]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    Console(file=stream).print(Follower(run).panel())
    for row in (RANKS_HEAD, *rows):
        line = next(ln for ln in stream.getvalue().splitlines() if ln.startswith(row[0]))
        assert all(word in line for word in row)


def test_of_many_ranks_the_latest_are_shown(run: Path) -> None:
    ranks = [{**WAITS, "rank": rank, "waited": 1 - rank / 100} for rank in range(40)]
    ranks[3]["phase"] = "silent"
    ranks[5] |= {"phase": "computes", "lag_s": 2.0}
    table(run, *ranks)
    rows = read_ranks(run).rows
    assert [row[0] for row in rows] == ["3", "5", *map(str, range(39, 25, -1)), "and 24 more"]


def test_a_check_is_no_step(run: Path) -> None:
    add(run, {"step": 3, "check/replicas_equal": 1})
    stream = io.StringIO()
    assert watched(run, lambda: add(run, record(3)), lambda: end(run), stream=stream) == 0
    assert [line[:12] for line in stream.getvalue().splitlines() if "/100" in line] == [
        "step 2/100  ",
        "step 3/100  ",
    ]


def test_the_command_ends_with_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, 124, reason="too late")
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    assert main(["watch", str(run)]) == 124
    assert capsys.readouterr().out.endswith("the run has ended: exit code 124: too late\n")


def test_a_run_that_is_being_started_is_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, looks = run.with_name("elsewhere"), []

    def sleep(_: float) -> None:
        looks.append(_)
        if len(looks) == 3:
            run.rename(elsewhere)
        elif len(looks) == 5:
            end(elsewhere)

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["watch", str(elsewhere)]) == 0
    assert len(looks) == 5
    said = capsys.readouterr().out.splitlines()
    assert str(elsewhere) in said[0]
    assert said[1].startswith("step 2/100")
    assert said[-1] == "the run has ended: done"


LOCK = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
LOCK += "print(flush=True); sys.stdin.read()"


def test_the_end_of_a_run_that_starts_again_does_not_count(run: Path) -> None:
    end(run, 75, reason="stopped by SIGTERM")
    words = [sys.executable, "-c", LOCK, str(run / "starts.jsonl")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    stream = io.StringIO()

    def go_on() -> None:
        (run / "exit.json").unlink()
        stack.close()

    happenings = (lambda: None, go_on, lambda: add(run, record(3)), lambda: end(run))
    with ExitStack() as stack:
        starting = stack.enter_context(subprocess.Popen(words, **pipes))
        assert starting.stdout is not None
        starting.stdout.readline()  # it reads its checkpoint
        assert watched(run, *happenings, stream=stream) == 0
    said = [line.partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert said[-2:] == ["step 3/100", "the run has ended: done"]
    assert len([line for line in said if "ended" in line]) == 1


def test_a_run_that_is_about_to_be_resumed_is_followed(run: Path) -> None:
    end(run, 75, reason="stopped by SIGTERM")
    stream = io.StringIO()
    happenings = ((run / "exit.json").unlink, lambda: add(run, record(3)), lambda: end(run))
    assert watched(run, lambda: None, *happenings, stream=stream) == 0
    said = [line.partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert said[-3:] == [
        "the run has ended: stopped by SIGTERM",
        "step 3/100",
        "the run has ended: done",
    ]


def test_ctrl_c_leaves_the_run_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    assert main(["watch", str(run)]) == 130
    assert capsys.readouterr().out.endswith("no longer watching; the run goes on\n")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "name a run directory"), (["nowhere"], "no run directory")]
)
def test_bad_arguments(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    assert main(["watch", *arguments]) == 2
    assert said in capsys.readouterr().err
