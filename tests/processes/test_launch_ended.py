"""The local launcher's report of an end, beyond its exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.launch.local import LaunchOutcome, launch_ranks
from support.fork_server import Forked, free_port
from support.launchers import clean_environment

RANK = """
import os, signal, sys, time
from pathlib import Path
rank, what, last = int(os.environ["RANK"]), sys.argv[1], int(os.environ["WORLD_SIZE"]) - 1
if what == "signal":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = Path(__file__).with_name("rank_1_is_deaf")
    if rank == 1:
        deaf.touch()
    else:
        while not deaf.exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
if what == "kill" or what == "kill once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    mine = Path(__file__).with_name("pid")
    if rank == last:
        mine.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    while not mine.exists() or not (pid := mine.read_text()) or Path("/proc", pid, "exe").exists():
        time.sleep(0.01)
    time.sleep(0.3)  # the launcher looks ten times a second
    print(f"rank {rank} has noticed", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ended_module.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def launch(what: str, **options: Any) -> LaunchOutcome:
    return launch_ranks([what], 2, log_dir=None, module="ended_module", **options)


def test_a_signal_that_no_rank_heeded_is_told() -> None:
    assert launch("signal") == LaunchOutcome(code=0, received=signal.SIGTERM, killed={})


def test_a_rank_that_was_killed_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """At once; the others, which may know more, are given the time to say it."""
    assert launch("kill") == LaunchOutcome(code=1, received=None, killed={1: signal.SIGKILL})
    assert capfd.readouterr().err == (
        "gradsync: error: rank 1 was ended by SIGKILL (killed by hand, or out of memory)\n"
        "rank 0 has noticed\n"
    )


def test_a_rank_is_started_again_though_nobody_can_be_told(monkeypatch: Any) -> None:
    """As after the terminal has gone; a death that was made good is none."""
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError("gone"))))
    assert launch("kill once", max_restarts=1) == LaunchOutcome(code=0, received=None, killed={})


OURS = ("gradsync", "rank ")
"""Beginnings of lines that are not torch's."""


def test_a_killed_rank_of_another_node(capfd: pytest.CaptureFixture[str]) -> None:
    """By its number in the whole run, not by its place on its host."""
    argv = ["launch", "--nproc-per-node=2", "--nnodes=2", "--master-addr=127.0.0.1"]
    argv += [f"--master-port={free_port()}"]
    words = ["--", "python", "-m", "ended_module", "kill"]
    node_0 = ["-m", "gradsync", *argv, "--node-rank=0", *words]
    with Forked(node_0, clean_environment()) as other:
        assert main([*argv, "--node-rank=1", *words]) == 1
        assert other.wait(60) == 1
    # Torch's store may write of the node that has gone, with a stack.
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(OURS)]
    assert said == [
        "gradsync: standard output is rank 0's; --log-dir DIR keeps the others'",
        "gradsync: error: rank 3 was ended by SIGKILL (killed by hand, or out of memory)",
        "rank 2 has noticed",
    ]


def test_a_node_that_is_done_does_not_stay_for_one_that_failed() -> None:
    """Torch's agent would, for five minutes."""
    argv = ["launch", "--nproc-per-node=1", "--nnodes=2", "--master-addr=127.0.0.1"]
    argv += [f"--master-port={free_port()}"]
    words = ["--", "python", "-c", "import os, sys; sys.exit(3 * int(os.environ['RANK']))"]
    node_1 = ["-m", "gradsync", *argv, "--node-rank=1", *words]
    with Forked(node_1, clean_environment()) as other:
        began = time.monotonic()
        assert main([*argv, "--node-rank=0", *words]) == 0
        assert other.wait(60) == 1
    assert time.monotonic() - began < 60
