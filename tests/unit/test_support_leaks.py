"""The leak check finds each kind of leak, names it, and fails the test that did it."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import leaks
from support.launchers import run_python

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def _variable(folder: Path) -> Iterator[str]:
    os.environ["LEAKED_VARIABLE"] = "1"
    yield "LEAKED_VARIABLE: None became '1'"
    del os.environ["LEAKED_VARIABLE"]


@contextmanager
def _thread(folder: Path) -> Iterator[str]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="leaked", daemon=True)
    thread.start()
    yield "thread 'leaked'"
    done.set()
    thread.join()


@contextmanager
def _child(folder: Path) -> Iterator[str]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield f"child process {child.pid}"
    child.kill()
    child.communicate()


@contextmanager
def _socket(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"listening socket {server.getsockname()}"


@contextmanager
def _file(folder: Path) -> Iterator[str]:
    (folder / "leaked.txt").touch()
    yield f"file {folder / 'leaked.txt'}"


@contextmanager
def _shared_memory(folder: Path) -> Iterator[str]:
    path = Path("/dev/shm", f"leaked-{os.getpid()}")
    path.touch()
    yield f"file {path}"
    path.unlink()


Leak = Callable[[Path], Iterator[str]]


@pytest.mark.parametrize("leak", [_variable, _thread, _child, _socket, _file, _shared_memory])
def test_names_what_was_left(leak: Leak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = leaks.snapshot()
    with leak(tmp_path) as expected:
        found = leaks.leaks_since(before, settle_s=0.0)
    assert len(found) == 1
    assert expected in found[0]


def test_a_quiet_test_leaves_nothing() -> None:
    assert leaks.leaks_since(leaks.snapshot(), settle_s=0.0) == []


LEAKY_TESTS = """
import os, threading

def test_leaks_a_variable():
    os.environ["LEAKED"] = "1"

def test_leaks_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_is_clean():
    assert "LEAKED" not in os.environ and "SLURM_PROCID" not in os.environ
    assert os.path.isdir(os.environ["GRADSYNC_CACHE"])
"""


def test_the_fixture_fails_a_leaking_test(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {REPOSITORY / 'tests'}\n")
    done = run_python(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        extra_env={"SLURM_PROCID": "3"},
    )
    assert done.returncode == 1, done.describe()
    assert "3 passed, 2 errors" in done.stdout
    assert "this test leaks: environment variable LEAKED" in done.stdout
    assert "this test leaks: thread" in done.stdout
