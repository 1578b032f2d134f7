"""`gradsync bench network` between two namespaces, which are gone afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gradsync.bench.network import namespaces
from gradsync.errors import RunError
from support.fork_server import run_forked
from support.launchers import run_python

_FOLDER = Path("/run/netns")


def left() -> list[str]:
    return [path.name for path in _FOLDER.glob("gradsync-bench-*")]


@pytest.mark.slow
@pytest.mark.launcher("namespaces")
def test_steps_at_a_rate(tmp_path: Path) -> None:
    size = ["--model-size", "tiny", "--context-length", "16", "--dtype", "fp32", "--rounds", "1"]
    words = ["--rates", "1000", "--strategies", "naive", "--num-steps", "1", "--num-warmup", "0"]
    picture = tmp_path / "picture.svg"
    (done,) = run_forked(
        ["-m", "gradsync", "bench", "network", *size, *words, "--json", "--plot", picture]
    )
    document = json.loads(done.ok().stdout)
    none, naive = document["rows"]
    assert (none["contestant"], naive["contestant"]) == ("none", "naive")
    assert naive["rate_mbit"] == 1000
    assert naive["sent_mb"] > 7.0  # it went through the cable
    assert naive["step_ms"]["median"] > 1000 * 8 * naive["sent_mb"] / 1000 / 1000
    assert document["floors"]["1000"] >= 1.0
    assert "</svg>" in picture.read_text()
    assert left() == []


@pytest.mark.launcher("namespaces")
def test_what_the_kernel_refuses_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    other = f"gradsync-bench-{os.getpid()}-1"
    with namespaces(1, 1000):
        with pytest.raises(RunError, match="File exists"), namespaces(2, 1000):
            pass
        assert other not in left()
    assert left() == []


KILLED = """
import os, signal, sys
from gradsync.bench.network import namespaces
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with namespaces(1, 1000):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals) -> None:
    done = run_python(["-c", KILLED, str(int(number))])
    assert done.returncode == 128 + number
    assert left() == []
