"""Refusals of `gradsync verify` at once, and what it still gives when something goes wrong."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tyro

from gradsync.commands.cli.main import main
from gradsync.commands.launch import local
from gradsync.commands.verify import command as verify
from gradsync.commands.verify.matrix import _RESULTS, _WORK
from gradsync.commands.verify.result import Result, print_report
from gradsync.commands.verify.settings import Cell
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

SMALL = ["--strategies", "naive", "--models", "mlp", "--dtypes", "fp32"]
WORDS = {"SIGINT": "interrupted", "SIGTERM": "ended by SIGTERM", "SIGHUP": "ended by SIGHUP"}

TARGET = """
import torch

def factory():
    return torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.ones(9, 1), torch.ones(9)), 5
"""


def pretend(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None], **ended: Any) -> list[int]:
    """Replace the ranks by results; returns the world sizes that were started."""
    started = []

    def launch_ranks(argv: list[str], nproc_per_node: int, **options: Any) -> local.LaunchOutcome:
        folder = Path(argv[2])
        started.append(nproc_per_node)
        work = json.loads((folder / _WORK).read_text())
        with (folder / _RESULTS).open("w") as done:
            for cell in work["cells"]:
                done.write(json.dumps(asdict(Result.of(Cell(**cell)))) + "\n")
        then()
        return local.LaunchOutcome(**{"code": 0, "received": None, "killed": {}} | ended)

    monkeypatch.setattr(local, "launch_ranks", launch_ranks)
    return started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "verify_command_target:factory"], "TypeError: 'int' object is not callable"),
        (["--target", "json:nothing"], "has no attribute 'nothing'"),
        (["--strategies", "nave"], "perhaps you meant 'naive'"),
        (["--models", "mpl"], "perhaps you meant 'mlp'"),
        (["--world-sizes", "two"], "--world-sizes must be numbers of ranks, got 'two'"),
        (["--world-sizes", "0"], "--world-sizes must be at least 1, got 0"),
        (["--num-steps", "0"], "--num-steps must be at least 1, got 0"),
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--dtypes", "fp8"], "unknown dtype 'fp8'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "verify_command_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    started = pretend(monkeypatch, lambda: None)
    assert main(["verify", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        ([], 3 * 3 * 1),
        (["--thorough"], 4 * 3 * 2),
        (["--strategies", "all", "--world-sizes", "1,2,3,4"], 4 * 3 * 1),
        (["--world-size", "2"], 1 * 3 * 1),
    ],
)
def test_thorough_adds_ranks_and_a_dtype(words: list[str], cells: int) -> None:
    plan = verify.plan_of(tyro.cli(verify.VerifyOptions, args=words), World())
    own = [cell for launch in plan.launches for cell in launch if not cell.loaded_from]
    assert len(own) == cells * len(STRATEGIES)


def test_ranks_start_once_for_each_size_and_once_more_for_the_last_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = pretend(monkeypatch, lambda: None)
    assert main(["verify"]) == 0
    assert started == [1, 2, 3, 1]


def test_a_reason_is_printed_once_with_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    def result(size: int, dtype: str, said: str, status: str = "error") -> Result:
        named = {"strategy": "naive", "world_size": size, "model": "target", "dtype": dtype}
        return Result(**named, promise="rounding", status=status, sentence=said)

    sizes = [(size, dtype) for size in (1, 2, 3, 4) for dtype in ("fp32", "bf16")]
    results = [result(*each, "rank 0 raised ValueError: no") for each in sizes]
    results.append(result(1, "fp32", "another", "failed"))
    print_report(results, 1.0, sys.stdout)
    printed = capsys.readouterr().out
    assert printed.count("raised ValueError: no") == 1
    assert "error 8 cells: rank 0 raised ValueError: no\n    naive W=1 target fp32, " in printed
    assert all(each.name in printed for each in results)
    assert "failed naive W=1 target fp32: another\n" in printed


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("reaches", ["the ranks", "this process"])
def test_a_signal_ends_it_and_leaves_nothing_behind(
    number: signal.Signals,
    reaches: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also when the ranks were just done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(number, signal.default_int_handler)  # a background job may ignore it
    try:
        if reaches == "the ranks":
            started = pretend(monkeypatch, lambda: None, received=number)
        else:
            started = pretend(monkeypatch, lambda: signal.raise_signal(number))
        assert main(["verify", *SMALL, "--world-sizes", "1,2", "--json"]) == 128 + number
    finally:
        signal.signal(number, before)
    assert started == [1]
    assert capsys.readouterr() == ("", f"gradsync: error: {WORDS[number.name]}\n")
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_put_back_and_what_nohup_ignores_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = []
    pretend(monkeypatch, lambda: inside.extend(map(signal.getsignal, SIGNALS)))
    chosen = [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]
    outside = [signal.signal(*pair) for pair in zip(SIGNALS, chosen, strict=True)]
    try:
        assert main(["verify", *SMALL, "--world-size", "1"]) == 0
        assert [signal.getsignal(number) for number in SIGNALS] == chosen
    finally:
        for number, handler in zip(SIGNALS, outside, strict=True):
            signal.signal(number, handler)
    assert signal.SIG_DFL not in inside
    assert inside[2] == signal.SIG_IGN
