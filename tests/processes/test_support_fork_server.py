"""Forked processes are as `python ARGV` would be: arguments, output, exit codes, ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import fork_server, processes
from support.fork_server import run_forked

FAILED = pytest.fail.Exception
SCRIPT = """
import atexit, os, sys, torch
atexit.register(print, "goodbye")
print(__name__, sys.argv[1:], os.environ["RANK"], os.getcwd())
print("wrong", file=sys.stderr)
sys.exit(5 + int(os.environ["RANK"]))
"""


def test_what_it_is_given_and_what_it_leaves(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_forked([script, "a b"], [{"RANK": "0"}, {"RANK": "1"}], cwd=tmp_path)
    for rank, (code, out, err) in enumerate(done):
        assert code == 5 + rank
        assert out == f"__main__ ['a b'] {rank} {tmp_path}\ngoodbye\n"
        assert err == "wrong\n"


def test_a_hang_shows_the_stacks_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\ndef hang_here():\n    time.sleep(1000)\nhang_here()\n")
    with pytest.raises(FAILED, match=r"not done after 1.0 s(.|\n)*in hang_here"):
        run_forked([script], timeout_s=1.0)


def test_a_descendant_left_behind_fails_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "SURVIVOR_GRACE_S", 0.1)
    script = tmp_path / "orphan.py"
    script.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    )
    with pytest.raises(FAILED, match=r"outlived the process: \['(\d+) \(sleep 1000\)") as caught:
        run_forked([script])
    pid = int(str(caught.value).split("['")[1].split()[0])
    assert processes.describe(pid) == f"{pid} (ended)"
