"""The helpers that run real launchers: clean start, bounded time, nothing left."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import launchers, processes
from support.launchers import Finished, run_command, run_mpirun, run_python, run_torchrun

FAILED = pytest.fail.Exception
HANG = "import time\ndef hang_here():\n    while True: time.sleep(0.1)\nhang_here()"
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


def test_gives_code_and_output() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"
    done = run_python(["-c", code])
    assert tuple(done) == (5, "out\n", "err\n")
    with pytest.raises(FAILED, match=r"exit 5\n(.|\n)*--- stderr\nerr"):
        done.ok()


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    # In one write: without Python's buffer, parts of two ranks' lines may mix.
    line = 'f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode()'
    script.write_text(f"import os; os.write(1, {line})\n")
    assert sorted(run_torchrun(2, [script]).ok().stdout.splitlines()) == ["0 2", "1 2"]


@pytest.mark.launcher("mpirun")
def test_mpirun() -> None:
    code = "import os; print(os.environ['OMPI_COMM_WORLD_RANK'], flush=True)"
    assert sorted(run_mpirun(3, ["-c", code]).ok().stdout.split()) == ["0", "1", "2"]


@pytest.mark.launcher("mpirun")
def test_a_hang_shows_the_ranks_stacks_and_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    with pytest.raises(FAILED, match=r"not done after 2.0 s") as caught:
        run_mpirun(2, [script], timeout_s=2.0)
    # Lines of two ranks may mix, and mpirun may end one while the other still writes.
    assert "Fatal Python error" in str(caught.value)
    assert "hang_here" in str(caught.value)


def test_a_descendant_left_behind_fails_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "SURVIVOR_GRACE_S", 0.1)
    with pytest.raises(FAILED, match=r"outlived their launcher: \['(\d+) \(sleep 1000\)") as caught:
        run_python(["-c", ORPHAN])
    pid = int(str(caught.value).split("['")[1].split()[0])
    assert processes.describe(pid) == f"{pid} (ended)"


def test_an_interrupted_wait_shows_the_stacks_and_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An exception in the middle of the wait, as a test's own timeout raises it.

    Not by a signal that the command sends: on a busy machine it may arrive while it is started.
    """
    hangs = tmp_path / "hangs"
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if hangs.exists():  # the second wait, once it was interrupted
            return wait(process, timeout)
        while not hangs.exists():
            time.sleep(0.01)
        raise TimeoutError("interrupted")

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    code = HANG.replace("while True", f"open({str(hangs)!r}, 'w')\n    while True")
    with pytest.raises(TimeoutError, match="interrupted"):
        run_command([sys.executable, "-c", code])
    assert "hang_here" in capfd.readouterr().err


def test_finished_describes_itself() -> None:
    assert Finished(("echo", "1"), 0, "1\n", "").describe().startswith("$ echo 1\n--- stdout\n1")
