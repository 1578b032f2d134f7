"""The local launcher's report of an end, beyond its exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gradsync.launch.local import LaunchOutcome, launch_ranks

RANK = """
import os, signal, sys, time
from pathlib import Path
rank, what = int(os.environ["RANK"]), sys.argv[1]
if what == "signal":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = Path(__file__).with_name("rank_1_is_deaf")
    if rank == 1:
        deaf.touch()
    else:
        while not deaf.exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
if what == "kill":
    mine = Path(__file__).with_name("pid")
    if rank == 1:
        mine.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    while not mine.exists() or Path("/proc", mine.read_text(), "exe").exists():
        time.sleep(0.01)
    time.sleep(0.3)  # the launcher looks ten times a second
    print("rank 0 has noticed", file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ended_module.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def launch(what: str) -> LaunchOutcome:
    return launch_ranks([what], 2, log_dir=None, module="ended_module")


def test_a_signal_that_no_rank_heeded_is_told() -> None:
    assert launch("signal") == LaunchOutcome(code=0, received=signal.SIGTERM, killed={})


def test_a_rank_that_was_killed_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """After what the others say of it: they are given the time."""
    assert launch("kill") == LaunchOutcome(code=1, received=None, killed={1: signal.SIGKILL})
    assert capfd.readouterr().err == (
        "rank 0 has noticed\n"
        "gradsync: error: rank 1 was ended by SIGKILL (killed by hand, or out of memory)\n"
    )


def test_a_good_end() -> None:
    assert launch("nothing") == LaunchOutcome(code=0, received=None, killed={})
