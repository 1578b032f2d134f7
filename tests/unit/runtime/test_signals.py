"""Signals ask, the loop answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradsync.errors import PeerError
from gradsync.runtime import signals
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.runtime.signals import HANDLED, LAUNCHED, StopRequest, end_program_as_said
from support.launchers import run_python


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in HANDLED]


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """SIGHUP's default action, also where the tests were started by nohup."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """nohup: the terminal goes, the run does not."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_requests_a_stop(name: str) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        assert stop.signal_name == ""
        assert signal.getsignal(signal.Signals[name]) == stop._on_signal  # else it ends the tests
        os.kill(os.getpid(), signal.Signals[name])
        assert stop.requested
        assert stop.signal_name == name


LATE = """
import os, signal, subprocess, sys
from gradsync.runtime.signals import StopRequest
how = sys.argv[1]
with StopRequest():
    os.kill(os.getpid(), signal.SIGTERM)
if how == "in a child":
    pid = os.fork() or os.kill(os.getpid(), signal.SIGTERM) or os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
elif how == "in a program":
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert subprocess.run([sys.executable, "-c", kill]).returncode == -signal.SIGTERM
for _ in range(int(how) if how.isdigit() else 0):
    os.kill(os.getpid(), signal.SIGTERM)
class AtExit:
    def __del__(self):  # when Python has dropped all handlers
        os.kill(os.getpid(), signal.SIGTERM)
signal.last = AtExit()
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("in a child", 75), ("in a program", 75), ("1", 75), ("2", -signal.SIGTERM)]
)
def test_a_launcher_may_pass_it_on_late(how: str, code: int) -> None:
    """Both the scheduler and the launcher signal a rank: once more after its stop, or as it exits.
    Someone who asks a third time, and every other process, is heard."""
    assert run_python(["-c", LATE, how]).returncode == code


def test_the_first_one_gives_the_name() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.request("SIGHUP")
        assert stop.signal_name == "SIGUSR1"


def test_handlers_are_put_back_after_an_exception() -> None:
    before = handlers()
    with pytest.raises(ValueError, match="no luck"), StopRequest():
        raise ValueError("no luck")
    assert handlers() == before


def test_handlers_of_others_are_put_back() -> None:
    heard: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, heard) == (True, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, original)


def test_another_thread_asks_by_itself() -> None:
    before, seen = handlers(), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(handlers() == before)  # none was installed: Python forbids it here
            stop.request("SIGTERM")
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, True]
    assert handlers() == before


@pytest.mark.parametrize(
    ("presses_s", "exits"),
    [
        ([0.0], []),
        ([0.0, 0.5], []),  # one Ctrl-C, from the terminal and forwarded by the launcher
        ([0.0, 1.5], [130]),
        ([0.0, 0.5, 1.5], [130]),
    ],
)
def test_only_a_second_press_ends_the_process(
    presses_s: list[float], exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    clock = iter(presses_s)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(signals, "os", SimpleNamespace(_exit=ended.append))
    with StopRequest() as stop:
        for _ in presses_s:
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_name == "SIGINT"
    assert ended == exits


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyboardInterrupt(), False),
        (PeerError("rank 0 failed first: interrupted", exit_code=130), False),
        (PeerError("rank 0 failed first: ValueError"), True),
        (PeerError("rank 0 on afar failed first: ValueError", host="afar"), True),
        (PeerError("rank 0 on here failed first: ValueError", rank=0, host="here"), False),
        (ValueError(), True),
    ],
)
def test_interrupts_and_errors_that_another_rank_shows_go_without_a_traceback(
    error: BaseException, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(signals, "_SILENCE_S", 0.0)
    monkeypatch.setattr(signals.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    before = sys.excepthook
    end_program_as_said(leave_out_interrupts=True)  # by a session that failed
    put_back = end_program_as_said(leave_out_interrupts=True)
    sys.excepthook(type(error), error, None)
    assert seen == [error] * shown
    put_back()
    assert sys.excepthook is before


@pytest.mark.parametrize("error", [None, SystemExit(75), ValueError()])
def test_a_session_keeps_the_hook_only_for_the_error_that_ended_it(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", before := sys.excepthook)
    session = Session(SessionOptions(device="cpu"), env={"ROLE_NAME": LAUNCHED})
    session.__enter__()
    assert sys.excepthook is not before
    session.close(error)
    assert (sys.excepthook is before) == (not isinstance(error, ValueError))


INTERRUPTED = """
from dataclasses import dataclass, field
from gradsync.runtime.signals import interrupted_line

def press():
    raise KeyboardInterrupt

@dataclass
class Made:
    x: object = field(default_factory=press)

try:
    Made()
except KeyboardInterrupt as error:
    error.__traceback__.tb_next.tb_next = None  # as if hit in the text of `__init__` itself
    print(interrupted_line(error))
"""


def test_an_interrupt_in_generated_code_is_told_by_the_users_line(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(INTERRUPTED)
    assert run_python([str(script)]).stdout == f"{script}:13\n"
    plain = INTERRUPTED.replace("    Made()", "    press()")
    assert run_python(["-c", plain]).stdout == "<string>:6\n"
