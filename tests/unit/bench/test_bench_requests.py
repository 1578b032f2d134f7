"""Every benchmark from the command line: refusals, dry runs, commands of records, exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsync.commands.bench import experiment
from gradsync.commands.cli.main import main
from gradsync.commands.launch import local
from gradsync.world import World
from support.bench_results import COLLECTIVES

REFUSALS = {
    "bench": [("colectives", "perhaps you meant 'collectives'")],
    "bench collectives": [
        ("--operations all_redcue", "unknown operation 'all_redcue'; perhaps you meant"),
        ("--algorithms rong", "unknown algorithm 'rong'; perhaps you meant 'ring'"),
        ("--operations broadcast --algorithms ring", "nothing to measure: broadcast by"),
        ("--sizes 12Q", "--sizes: '12Q' is no size"),
        ("--world-size 1", "--world-size must be at least 2; got 1"),
        ("--dtype fp31", "unknown dtype 'fp31'; perhaps you meant 'fp32'"),
        ("--device gpu", "invalid choice 'gpu' for argument '--device'"),
        ("--device cuda", "--device cuda: torch finds no CUDA device here"),
        ("--rounds 0", "--rounds must be at least 1; got 0"),
        ("--out file/x", "--out file/x: file is no folder"),
    ],
    "bench scaling": [
        ("--world-sizes 1", "name a number above 1"),
        ("--world-sizes 0,2", "--world-sizes takes numbers of ranks"),
        ("--strategy bucketd", "perhaps you meant 'bucketed'"),
        ("--strategy naive,flat", "--strategy takes one name"),
        ("--rounds 5", "--rounds must be at least 6"),
        ("--world-sizes 2,3 --mode strong", "does not divide among 2 ranks"),
    ],
    "bench sync": [
        ("--model-size tinny", "unknown model preset"),
        (
            "--host --strategies naive:loop=mine",
            "naive: loop must be user or sync.step, got 'mine'",
        ),
    ],
    "bench sync --model-size tiny": [
        ("--context-length 300", "takes 1 to 256 tokens"),
        ("--batch-size 0", "--batch-size must be at least 1"),
        ("--micro-batches-per-rank 2", "does not divide into 2 micro-batches"),
        ("--dtype fp8", "invalid choice 'fp8' for argument '--dtype'"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--device cuda", "torch finds no CUDA device here"),
        ("--dtype fp32 --csv /dev/null/x.csv", "/dev/null is no folder"),
    ],
    "tune": [
        ("tny", "unknown model preset"),
        ("--world-size 1", "--world-size must be at least 2; got 1"),
        ("--rounds 8", "--rounds must be at least 9; got 8"),
        ("--batch-size 3 --micro-batches-per-rank 2", "3 does not divide into 2 micro-batches"),
        ("--context-length 999", "'tiny' takes 1 to 256 tokens"),
        ("--data nowhere", "--data nowhere is no directory"),
        ("--out /dev/null/x", "--out"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [(command, *refused) for command, cases in REFUSALS.items() for refused in cases],
)
def test_what_cannot_be_is_refused_in_one_line_before_any_rank_starts(
    command: str,
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(local, "launch_ranks", None)
    Path("file").touch()
    assert main([*command.split(), *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_what_starts_its_own_ranks_refuses_those_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(world_size=2, local_world_size=2, launcher="torchrun")
    monkeypatch.setattr(experiment, "resolve", lambda _: SimpleNamespace(world=world))
    assert main(["bench", "scaling"]) == 2
    assert "bench scaling starts ranks itself: run it without" in capsys.readouterr().err


def pretend(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None = None, **ended: Any
) -> None:
    """Replace the ranks of `bench collectives` by a result."""

    def launch_ranks(argv: list[str], nproc_per_node: int, **options: Any) -> local.LaunchOutcome:
        assert argv[:3] == ["bench", "collectives", "--worker"]
        assert nproc_per_node == 2
        work = json.loads((Path(argv[3]) / "work.json").read_text())
        assert work["rounds"] == 7
        if found is not None:
            (Path(argv[3]) / "result.json").write_text(json.dumps(found))
        return local.LaunchOutcome(**{"received": None, "killed": {}, **ended})

    monkeypatch.setattr(local, "launch_ranks", launch_ranks)


def test_the_document_and_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    pretend(monkeypatch, COLLECTIVES, code=0)
    places = ["--out", str(tmp_path / "out"), "--save"]
    assert main(["bench", "collectives", "--json", "--sizes", "1000,4K", *places]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["passed"]
    assert [row["algorithm"] for row in document["rows"]] == ["ring", "copy"] * 2
    assert document["fits"][0]["operation"] == "all_reduce"
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["benchmark"] == "collectives"
    assert record["command"] == "gradsync bench collectives --sizes 1000,4K"
    assert record["samples"] == COLLECTIVES["samples"]
    assert "all_reduce" in printed.err
    [kept] = (tmp_path / "cache" / "alpha-beta").iterdir()
    assert f"kept alpha and beta in {kept}" in printed.err


@pytest.mark.parametrize(
    ("found", "ended", "code", "message"),
    [
        (COLLECTIVES | {"wrong": ["a line"]}, {"code": 0}, 1, ""),
        (None, {"code": 2}, 2, ""),  # the ranks have said why
        (None, {"code": 0}, 1, "gradsync: error: the ranks ended without a result\n"),
        (
            *(None, {"code": 75, "received": signal.SIGTERM}, 143),
            "gradsync: error: ended by SIGTERM\n",
        ),
    ],
)
def test_exit_codes(
    found: dict[str, Any] | None,
    ended: dict[str, Any],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, found, **ended)
    assert main(["bench", "collectives"]) == code
    printed = capsys.readouterr()
    assert printed.err == message
    assert ("WRONG a line" in printed.out) == (found is not None)
