"""The helpers that run real launchers: clean start, bounded time, nothing left."""

import pytest

from support import launchers, processes
from support.launchers import run_python

FAILED = pytest.fail.Exception


ORPHAN = """
import subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""


def test_no_launcher_variable_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    code = "import os; print(sorted(os.environ))"
    names = run_python(["-c", code], extra_env={"WORLD_SIZE": "2"}).ok().stdout
    assert "'WORLD_SIZE'" in names
    assert "'GRADSYNC_CACHE'" in names
    for name in ("'RANK", "'SLURM", "'OMPI", "'PMIX", "'MASTER"):
        assert name not in names


def test_a_descendant_left_behind_fails_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "SURVIVOR_GRACE_S", 0.1)
    with pytest.raises(FAILED, match=r"outlived their launcher: \['(\d+) \(sleep 1000\)") as caught:
        run_python(["-c", ORPHAN])
    pid = int(str(caught.value).split("['")[1].split()[0])
    assert processes.describe(pid) == f"{pid} (ended)"
