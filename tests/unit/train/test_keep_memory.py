"""Freed memory stays in the process: seen in the kernel's count of page faults, not in times."""

from __future__ import annotations

import json
import platform
from types import SimpleNamespace

import pytest

from gradsync.runtime import machine
from gradsync.runtime.machine import keep_freed_memory
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from support.launchers import run_python

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own settings")

# In a process of its own: the setting cannot be taken back. Blocks of 80 MiB lie above the largest
# threshold that glibc finds for itself, and above what the heap of a second thread could hold.
FAULTS = """
import json, resource, sys, threading
from gradsync.runtime.machine import keep_freed_memory

applied = [keep_freed_memory() for _ in range(2)] if "keep" in sys.argv else []

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def rounds(found):
    for number in range(4):
        if number == 1:
            before = faults()
        blocks = [b"x" * (80 << 20), b"x" * (3 << 20)]
        del blocks
    found.append((faults() - before) / 3)

found = []
rounds(found)
thread = threading.Thread(target=rounds, args=(found,))
thread.start()
thread.join()
print(json.dumps({"applied": applied, "faults": found}))
"""


def faults_per_round(*arguments: str) -> dict[str, list[float]]:
    return json.loads(run_python(["-c", FAULTS, *arguments]).ok().stdout)


@glibc
def test_the_pages_of_big_temporaries_are_used_again() -> None:
    usual, kept = faults_per_round(), faults_per_round("keep")
    assert kept["applied"] == [True, True]
    for before, after in zip(usual["faults"], kept["faults"], strict=True):
        # 83 MiB are 21,000 pages of 4 KiB, or 41 of 2 MiB.
        assert before >= 40
        assert after < before / 10


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="darwin"))
    assert not keep_freed_memory()


@pytest.mark.parametrize("asked", [False, True])
def test_a_session_sets_it_only_when_asked(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "gradsync.runtime.session.keep_freed_memory", lambda: calls.append("set") is None
    )
    with Session(SessionOptions(device="cpu", keep_memory=asked), env={}):
        pass
    assert calls == ["set"] * asked
