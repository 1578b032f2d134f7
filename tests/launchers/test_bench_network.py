"""benchmarks/network.py between two namespaces, which are gone afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import network
import pytest

from gradsync.commands.models.config import PRESETS
from support.fork_server import run_forked
from support.launchers import run_python

_FOLDER = Path("/run/netns")
_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def left_over() -> list[str]:
    """Namespaces of this process, and of ones that have ended; other tests are making theirs."""
    found = {path.name: path.name.split("-")[2] for path in _FOLDER.glob("gradsync-bench-*")}
    own = str(os.getpid())
    return [name for name, pid in found.items() if pid == own or not Path("/proc", pid).exists()]


@pytest.mark.slow
@pytest.mark.launcher("namespaces")
def test_steps_at_a_rate(tmp_path: Path) -> None:
    size = ["--model-size", "tiny", "--context-length", "16", "--dtype", "fp32", "--rounds", "1"]
    words = ["--rates", "1000", "--strategies", "naive", "--num-steps", "1", "--num-warmup", "0"]
    words += ["--delay-ms", "5"]
    (done,) = run_forked([network.__file__, *size, *words, "--json", "--out", tmp_path])
    document = json.loads(done.ok().stdout)
    none, naive = document["rows"]
    assert (none["contestant"], naive["contestant"]) == ("none", "naive")
    assert naive["rate_mbit"] == 1000
    assert naive["sent_mb"] > 7.0  # it went through the cable
    # Ten of its blocking all-reduces, at least, wait for a message each way.
    assert naive["step_ms"]["median"] > 8 * naive["sent_mb"] + 10 * 5, document
    assert document["floors"]["1000"] >= 1.0
    assert document["environment"]["tcp_congestion"] in _CONTROLS.read_text().split()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rows"] == document["rows"]
    own, options, command = network.parsed(shlex.split(record["command"])[2:])
    assert command == record["command"]
    assert (own.delay_ms, options.model_size, options.world_size) == (5.0, "tiny", 2)
    assert left_over() == []


KILLED = """
import os, signal, sys
from network import namespaces
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with namespaces(1, delayed=len(sys.argv) > 2):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.launcher("namespaces")
@pytest.mark.parametrize(("number", "how"), [(signal.SIGTERM, ["delayed"]), (signal.SIGHUP, [])])
def test_a_signal_leaves_nothing(number: signal.Signals, how: list[str]) -> None:
    path = os.pathsep.join([str(Path(network.__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = run_python(["-c", KILLED, str(int(number)), *how], extra_env={"PYTHONPATH": path})
    assert done.returncode == 128 + number
    assert left_over() == []


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_floor_is_what_the_cable_or_the_processor_takes(hosts: int) -> None:
    size = PRESETS["tiny"].num_params()
    bits = 32 * size * 2 * (hosts - 1) / hosts
    assert network.floor(size, hosts, 1, 0.1) == pytest.approx(bits / 1e6 / 0.1)
    assert network.floor(size, hosts, 10**6, 0.1) == 1.0
