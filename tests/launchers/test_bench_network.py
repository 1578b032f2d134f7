"""benchmarks/network.py between two namespaces, which are gone afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import network
import pytest
from network import namespaces

from gradsync.commands.models.config import PRESETS
from gradsync.errors import RunError
from support.fork_server import run_forked
from support.launchers import run_python
from support.namespaces import enter

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
    words += ["--delay-ms", "20"]
    (done,) = run_forked([network.__file__, *size, *words, "--json", "--out", tmp_path])
    document = json.loads(done.ok().stdout)
    none, naive = document["rows"]
    assert (none["contestant"], naive["contestant"]) == ("none", "naive")
    assert naive["rate_mbit"] == 1000
    assert naive["sent_mb"] > 7.0  # it went through the cable
    # Ten of its blocking all-reduces, at least, wait for a message each way.
    assert naive["step_ms"]["median"] > 8 * naive["sent_mb"] + 10 * 20, document
    assert document["floors"]["1000"] >= 1.0
    assert document["environment"]["tcp_congestion"] in _CONTROLS.read_text().split()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rows"] == document["rows"]
    own, options, command = network.parsed(shlex.split(record["command"])[2:])
    assert command == record["command"]
    assert (own.delay_ms, options.model_size, options.world_size) == (20.0, "tiny", 2)
    assert left_over() == []


@pytest.mark.launcher("namespaces")
def test_what_the_kernel_refuses_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    other = f"gradsync-bench-{os.getpid()}-1"
    with namespaces(1):
        with pytest.raises(RunError, match="File exists"), namespaces(2):
            pass
        assert other not in left_over()
    assert left_over() == []


def to_first(hosts: list[str]) -> list[tuple[socket.socket, socket.socket]]:
    """Connections from each of the other hosts to the first one: their two ends."""

    def at_home() -> socket.socket:
        enter(hosts[0])  # this thread alone
        return socket.create_server(("10.83.0.1", 0))

    def away(host: str, port: int) -> socket.socket:
        enter(host)
        return socket.create_connection(("10.83.0.1", port), timeout=10)

    found = []
    with ThreadPoolExecutor(1) as one, one.submit(at_home).result() as server:
        for host in hosts[1:]:
            with ThreadPoolExecutor(1) as other:
                near = other.submit(away, host, server.getsockname()[1]).result()
            far, _ = server.accept()
            far.settimeout(10)
            for end in (near, far):  # a congestion control that every kernel has
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            found.append((near, far))
    return found


def receive(end: socket.socket, left: int) -> None:
    while left:
        left -= len(end.recv(left))


@pytest.mark.launcher("namespaces")
def test_a_delay_is_kept_and_little_more_and_a_host_receives_at_the_rate() -> None:
    asked_s, rate_mbit, size = 0.02, 400, 12_000_000
    trips = []
    with ExitStack() as stack:
        network = stack.enter_context(namespaces(3, delayed=True))
        ends = to_first(network.hosts)
        for end in chain(*ends):
            stack.enter_context(end)
        network.limit(rate_mbit, 1000 * asked_s)
        near, far = ends[0]
        for _ in range(15):
            began = time.perf_counter()
            near.sendall(b"x")
            far.sendall(far.recv(1))
            near.recv(1)
            trips.append(time.perf_counter() - began)
        assert min(trips) >= asked_s
        assert statistics.median(trips) < asked_s + 0.01
        began = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:  # two send to one
            for near, far in ends:
                pool.submit(near.sendall, bytes(size))
                pool.submit(receive, far, size)
        took_s = time.perf_counter() - began
    least_s = (2 * size - 500_000) * 8 / (rate_mbit * 1e6)
    assert least_s < took_s < 4 * least_s
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rates 0", "--rates '0': name whole numbers of Mbit/s"),
        ("--rates fast", "name whole numbers of Mbit/s, 1 to 400000"),
        ("--rates ,", "name whole numbers"),
        ("--hosts 1", "--hosts must be at least 2; got 1"),
        ("--hosts 251", "--hosts must be at most 250"),
        ("--ranks-per-host 0", "--ranks-per-host must be at least 1"),
        ("--delay-ms -1", "--delay-ms must be finite and not negative"),
        ("--model-size tinny", "unknown model preset"),
        ("--strategies invarant", "perhaps you meant 'invariant'"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--out /dev/null/x", "is no folder"),
    ],
)
def test_what_cannot_be_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network.main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert network.main(["--model-size", "tiny"]) == 1
    assert "take root, Linux and iproute2 (ip, tc)" in capsys.readouterr().err
