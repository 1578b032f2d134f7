"""Ranks started on this host through torch's elastic agent: output, exit codes, signals."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradsync.commands.launch.local import _signals_to, launch_ranks
from gradsync.errors import ConfigError
from gradsync.runtime.store import wait_until
from support import processes
from support.fork_server import Forked

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
out = Path(sys.argv[1])

def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
"""

# Every rank notes each signal; rank 0 ends first, rank 1 a good while after it is gone.
STOPPING = """
got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(int(number)))
(out / f"pid{rank}").write_text(str(os.getpid()))
wait_for(lambda: (out / f"pid{1 - rank}").exists() and (out / f"pid{1 - rank}").read_text())
(out / f"ready{rank}").touch()
wait_for(lambda: got)
if rank == 1:
    other = Path("/proc", (out / "pid0").read_text())
    wait_for(lambda: not other.exists())
    time.sleep(0.3)  # whatever the end of rank 0 sets off comes now
(out / f"got{rank}").write_text(json.dumps(got))
sys.exit(75)
"""

# The launcher as a process of its own, which signals can be sent to.
LAUNCHER = """
import signal, sys
from pathlib import Path
from gradsync.commands.launch.local import launch_ranks
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by
sys.exit(launch_ranks(sys.argv[1:], 2, log_dir=None, module="rank_module").code)
"""


@pytest.fixture
def rank_module(tmp_path, monkeypatch):
    """Make `rank_module` a module that the ranks can import, from its text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(text):
        (tmp_path / "rank_module.py").write_text(HEAD + text)

    return write


def launch(out, *argv, nproc=2, **options):
    """The exit code of a launch in this process, to which the leak check applies."""
    options = {"log_dir": None} | options
    return launch_ranks([str(out), *argv], nproc, module="rank_module", **options).code


def start_launcher(out, stdout="", **variables):
    (out / "launcher.py").write_text(LAUNCHER)
    return Forked([out / "launcher.py", out], {**os.environ, **variables}, stdout=stdout)


def wait_for_files(*paths):
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.02)


def test_ranks_see_their_place_whatever_the_environment_says(tmp_path, rank_module, monkeypatch):
    rank_module("""
from gradsync.runtime import environ
from gradsync.runtime.coordinator import plan_coordinator
from gradsync.runtime.resolve import resolve
env = environ.snapshot()
world = resolve(env).world
plan = plan_coordinator(env, resolve(env))
(out / f"rank{rank}").write_text(json.dumps({
    "world": [world.rank, world.world_size, world.local_rank, world.local_world_size],
    "node": [world.node_rank, world.num_nodes],
    "plan": [plan.kind, plan.address, plan.hosted_by_agent],
    "argv": sys.argv[2:],
    "main": sys.modules["__main__"].__spec__.name,
    "threads": env.get("OMP_NUM_THREADS"),
}))
""")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    assert launch(tmp_path, "--cost", "$$5 ${local_rank}", "") == 0
    assert dict(os.environ) == before
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}").read_text())
        assert seen["world"] == [rank, 2, rank, 2]
        assert seen["node"] == [0, 1]
        assert seen["plan"] == ["given", "127.0.0.1", True]
        assert seen["argv"] == ["--cost", "$$5 ${local_rank}", ""]
        assert seen["main"] == "rank_module"
        assert seen["threads"] is None


def test_the_store_listens_on_the_loopback_only_and_closes(tmp_path, rank_module):
    rank_module("""
import psutil
found = psutil.Process(os.getppid()).net_connections("inet")
port = int(os.environ["MASTER_PORT"])
listening = [c.laddr.ip for c in found if c.status == "LISTEN" and c.laddr.port == port]
(out / f"rank{rank}").write_text(json.dumps([port, listening]))
""")
    import psutil

    assert launch(tmp_path, nproc=1) == 0
    port, listening = json.loads((tmp_path / "rank0").read_text())
    assert listening == ["127.0.0.1"]
    mine = psutil.Process().net_connections("inet")
    assert port not in [c.laddr.port for c in mine if c.status == "LISTEN"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ("0 0", 0),
        ("2 2", 2),
        ("0 3", 1),
        ("2 wait", 2),
        ("124 0", 124),
        ("wait -9", 1),
        ("1 late", 124),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    tmp_path, rank_module, codes, code, monkeypatch
):
    """`wait` is a rank that would go on for ever: it is ended, and its code then is no cause.
    `late` is one that gives up waiting after another one has failed."""
    monkeypatch.setattr("gradsync.commands.launch.local.LAST_WORDS_S", 1.0)
    rank_module("""
mine = sys.argv[2].split()[rank]
if mine == "wait":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(124))
    (out / "waiting").touch()
    signal.pause()
if mine == "late":
    time.sleep(0.4)
    sys.exit(124)
wait_for(lambda: "wait" not in sys.argv[2] or (out / "waiting").exists())
if int(mine) < 0:
    os.kill(os.getpid(), -int(mine))
sys.exit(int(mine))
""")
    assert launch(tmp_path, codes) == code


def test_output_passes_through_and_the_agent_is_silent(tmp_path, rank_module, capfd, caplog):
    caplog.set_level("INFO")
    rank_module("""
print(f"out {rank}")
print(f"err {rank}", file=sys.stderr)
sys.exit(5)
""")
    assert launch(tmp_path, log_dir=tmp_path / "logs", nproc=1) == 1
    assert launch(tmp_path, log_dir=tmp_path / "logs") == 1
    out, err = capfd.readouterr()
    assert set(out.splitlines()) <= {"out 0"}
    assert set(err.splitlines()) <= {"err 0", "err 1"}
    assert out.count("out 0") >= 1
    assert [record for record in caplog.records if record.name.startswith("torch.")] == []


def test_standard_output_of_other_ranks_goes_to_the_log_folder(tmp_path, rank_module, capfd):
    rank_module("print(f'out {rank}')")
    assert launch(tmp_path, log_dir=tmp_path / "logs") == 0
    assert capfd.readouterr() == ("out 0\n", "")
    assert (tmp_path / "logs" / "rank_00001.stdout.log").read_text() == "out 1\n"
    assert launch(tmp_path) == 0
    assert capfd.readouterr() == ("out 0\n", "")


def test_rank_0_keeps_the_terminal(tmp_path, rank_module):
    rank_module("(out / f'tty{rank}').write_text(str(sys.stdout.isatty()))")
    leader, follower = os.openpty()
    try:
        with start_launcher(tmp_path, stdout=os.ttyname(follower)) as launcher:
            assert launcher.wait(60) == 0
    finally:
        os.close(leader)
        os.close(follower)
    assert (tmp_path / "tty0").read_text() == "True"
    assert (tmp_path / "tty1").read_text() == "False"


@pytest.mark.parametrize("first", [3, 124, 2, 75, 130])
def test_a_failure_is_started_again_but_no_usage_error_or_clean_stop(tmp_path, rank_module, first):
    rank_module("""
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
(out / f"attempt{attempt}.{rank}").touch()
wait_for(lambda: (out / f"attempt{attempt}.{1 - rank}").exists())
sys.exit(int(sys.argv[2]) if attempt == "0" else 0)
""")
    again = first in (3, 124)
    assert launch(tmp_path, str(first), max_restarts=2) == (0 if again else first)
    assert (tmp_path / "attempt1.0").exists() == again
    assert not (tmp_path / "attempt2.0").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once_and_all_may_finish(tmp_path, rank_module, number):
    rank_module(STOPPING)
    with start_launcher(tmp_path) as launcher:
        wait_for_files(tmp_path / "ready0", tmp_path / "ready1")
        launcher.send_signal(number)
        assert launcher.wait(60) == 75
        assert launcher.finished().stderr == ""
    for rank in range(2):
        assert json.loads((tmp_path / f"got{rank}").read_text()) == [number]


def test_an_ignored_signal_stays_ignored():
    """nohup: the terminal goes, the run does not."""

    def on_signal(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals_to(SimpleNamespace(on_signal=on_signal)):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is on_signal
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_that_stop_by_themselves_are_left_in_peace(tmp_path, rank_module):
    """A scheduler may signal the ranks themselves: the first one to end must not hurt the other."""
    rank_module(
        STOPPING.replace(
            "wait_for(lambda: got)", "os.kill(os.getpid(), signal.SIGUSR1); wait_for(lambda: got)"
        )
    )
    assert launch(tmp_path) == 75
    for rank in range(2):
        assert json.loads((tmp_path / f"got{rank}").read_text()) == [signal.SIGUSR1]


def test_a_second_interrupt_goes_straight_through(tmp_path, rank_module):
    rank_module("""
def first(number, frame):
    signal.signal(number, lambda number, frame: os._exit(130))
    (out / f"first{rank}").touch()
signal.signal(signal.SIGINT, first)
(out / f"ready{rank}").touch()
while True:
    signal.pause()
""")
    with start_launcher(tmp_path) as launcher:
        wait_for_files(tmp_path / "ready0", tmp_path / "ready1")
        launcher.send_signal(signal.SIGINT)
        wait_for_files(tmp_path / "first0", tmp_path / "first1")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130


def test_ranks_that_know_nothing_of_signals_end_by_them(tmp_path, rank_module):
    rank_module("(out / f'ready{rank}').touch(); signal.pause()")
    with start_launcher(tmp_path) as launcher:
        wait_for_files(tmp_path / "ready0", tmp_path / "ready1")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 143


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path, rank_module):
    rank_module("(out / f'pid{rank}').write_text(str(os.getpid())); signal.pause()")
    # Not in our own environment, which the fork server would take over, if it starts here.
    with start_launcher(tmp_path, LAUNCH_TEST_MARK=str(tmp_path)) as launcher:
        pids = [tmp_path / "pid0", tmp_path / "pid1"]
        wait_for_files(*pids)
        wait_until(lambda: pids[1].read_text() != "", time.monotonic() + 10)
        os.kill(int(pids[1].read_text()), signal.SIGSTOP)  # not even that keeps one for ever
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(60)
        mark = f"LAUNCH_TEST_MARK={tmp_path}"
        assert processes.wait_until_gone(mark, timeout_s=10) == []


@pytest.mark.parametrize("options", [{"nproc": 0}, {"max_restarts": -1}])
def test_counts_that_make_no_sense(options):
    with pytest.raises(ConfigError, match="must be at least"):
        launch(Path(), **options)


@pytest.mark.parametrize(("other", "seconds"), [("stops", 0.0), ("saves", 1.0), ("is deaf", 0.0)])
def test_after_a_failure_no_rank_keeps_the_launcher(
    tmp_path, rank_module, monkeypatch, other, seconds
):
    """A stopped rank prints no message, and is woken to end; one that saves may finish; one that
    ignores it is killed."""
    last_words_s = 30.0 if other == "stops" else 0.3
    monkeypatch.setattr("gradsync.commands.launch.local.LAST_WORDS_S", last_words_s)
    monkeypatch.setattr("gradsync.commands.launch.local.END_S", 3.0)
    rank_module("""
def save(number, frame):
    time.sleep(1.0)
    (out / "saved").touch()
    sys.exit(1)

if rank == 1:
    signal.signal(signal.SIGTERM, {"saves": save, "is deaf": signal.SIG_IGN}.get(sys.argv[2], 0))
    (out / "ready").touch()
    if sys.argv[2] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()
wait_for((out / "ready").exists)
time.sleep(0.2)
(out / "failed").write_text(str(time.time()))
sys.exit(1)
""")
    assert launch(tmp_path, other) == 1
    took_s = time.time() - float((tmp_path / "failed").read_text())
    assert seconds <= took_s < 3.0 + 5.0  # torch's own limit is 30 s
    assert (tmp_path / "saved").exists() == (other == "saves")


def test_a_stop_wakes_a_rank_that_is_stopped_and_ends_one_that_others_gave_up(
    tmp_path, rank_module, monkeypatch
):
    monkeypatch.setattr("gradsync.commands.launch.local.END_S", 0.5)
    rank_module("""
number = [signal.SIG_IGN, lambda number, frame: sys.exit(124)][rank]
signal.signal(signal.SIGTERM, number)
(out / f"ready{rank}").touch()
if rank == 1:
    wait_for((out / "ready0").exists)
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0.1)
""")
    began = time.monotonic()
    assert launch(tmp_path) == 124
    assert time.monotonic() - began < 20  # not the minute that ranks have to save
