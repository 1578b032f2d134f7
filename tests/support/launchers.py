"""Run a command under a real launcher, from a clean environment, never longer than its timeout.

All `run_*` helpers take *Python arguments* (`["script.py", "--flag"]`, `["-m", "gradsync", …]`), so
that one test can be given to every launcher, and return a `Finished`.

A command that does not end in time has its ranks aborted first (faulthandler is on, so Python ranks
print their stacks), is then killed with all its descendants, and fails the test with all output.
A command that ends but leaves a process behind fails the test too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict, Unpack

import pytest

from support import processes

if TYPE_CHECKING:
    from support.slurm_cluster import SlurmCluster

Words = Sequence[str | Path]
Variables = Mapping[str, str]

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ENVIRONMENT")
LAUNCHER_PREFIXES = (
    *("LOCAL_", "MASTER_", "ROLE_", "GROUP_WORLD_", "TORCHELASTIC_", "GRADSYNC_"),
    *("OMPI_", "PMI", "PRTE_", "MV2_", "MPI_", "HYDRA_"),  # PMI is PMI_, PMI2_ and PMIX_
    *("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_"),
    *("PALS_", "PBS_", "FLUX_"),
)
KEPT = ("GRADSYNC_CACHE", "GRADSYNC_TEST_REQUIRE")
"""Set by the test run itself, so not cleaned away."""
ABORT_GRACE_S = 3.0
"""How long aborted ranks have to print their stacks."""
SURVIVOR_GRACE_S = 5.0
"""How long a rank may outlive its launcher."""


@dataclass(frozen=True)
class Finished:
    """The result of a command; unpacks as `returncode, stdout, stderr`."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    def __iter__(self) -> Iterator[int | str]:
        return iter((self.returncode, self.stdout, self.stderr))

    def ok(self) -> Finished:
        """Itself when the command succeeded; fails the test with all output otherwise."""
        if self.returncode != 0:
            pytest.fail(f"exit {self.returncode}\n{self.describe()}", pytrace=False)
        return self

    def describe(self) -> str:
        """The command and all it wrote."""
        return f"$ {' '.join(self.argv)}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def is_launcher_variable(name: str) -> bool:
    """True for a variable that says something about ranks and would leak into a child's world."""
    return name not in KEPT and (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES))


def clean_environment(extra: Variables | None = None) -> dict[str, str]:
    """Our environment without launcher variables, this Python first on PATH, plus `extra`."""
    base = {name: value for name, value in os.environ.items() if not is_launcher_variable(name)}
    scripts = str(Path(sys.executable).parent)
    base["PATH"] = os.pathsep.join((scripts, base.get("PATH", os.defpath)))
    base["PYTHONFAULTHANDLER"] = "1"
    base.pop("PYTHONUNBUFFERED", None)  # writes a line and its end apart: ranks' lines would mix
    return base | dict(extra or {})


class Options(TypedDict, total=False):
    """How a command is run, beside its words."""

    extra_env: Variables
    """Beside `clean_environment()`."""
    cwd: Path | None
    timeout_s: float


def run_command(
    argv: Words,
    *,
    env: Variables | None = None,
    extra_env: Variables | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
) -> Finished:
    """Run any command; `env` is its whole environment (default: `clean_environment(extra_env)`)."""
    words = tuple(str(word) for word in argv)
    mark = secrets.token_hex(8)
    variables = {**(clean_environment(extra_env) if env is None else env), "TEST_RUN_MARK": mark}
    mark = f"TEST_RUN_MARK={mark}"
    # Files, not pipes: a descendant that lives on cannot keep us waiting for the end of the output.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            words,
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        in_time = True
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            in_time = False
            _abort_ranks(process, mark)
        except BaseException:  # the test's own timeout: show here what the ranks were doing
            in_time = False
            _abort_ranks(process, mark)
            print(_text(out), _text(err), file=sys.stderr)
            raise
        finally:
            grace_s = SURVIVOR_GRACE_S if process.poll() is not None and in_time else 0.0
            left = [processes.describe(pid) for pid in processes.wait_until_gone(mark, grace_s)]
            processes.end_all(mark)
            process.wait()
        done = Finished(words, process.returncode, _text(out), _text(err))
    if not in_time:
        pytest.fail(f"not done after {timeout_s} s\n{done.describe()}", pytrace=False)
    if left:
        pytest.fail(f"outlived their launcher: {left}\n{done.describe()}", pytrace=False)
    return done


def run_python(argv: Words, **options: Unpack[Options]) -> Finished:
    """`python ARGV`: one process and no launcher."""
    return run_command([sys.executable, *argv], **options)


def run_torchrun(
    n: int, argv: Words, *, flags: Words = ("--standalone",), **options: Unpack[Options]
) -> Finished:
    """`torchrun --nproc-per-node N ARGV`; --standalone takes a free port: no collisions.

    The agent is forked from a process that has torch loaded; its ranks start as ever.
    """
    from support.fork_server import run_forked

    extra_env = options.pop("extra_env", None) or {}
    with tempfile.TemporaryDirectory() as logs:  # torchrun would leave its own folder behind
        torchrun = ["-m", "torch.distributed.run", f"--log-dir={logs}", *flags]
        words = [*torchrun, f"--nproc-per-node={n}", *argv]
        return run_forked(words, [extra_env], **options)[0]


def run_mpirun(n: int, argv: Words, **options: Unpack[Options]) -> Finished:
    """`mpirun -np N python ARGV`, on any number of cores and also as root."""
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(n)]
    if os.geteuid() == 0:
        mpirun.insert(1, "--allow-run-as-root")
    return run_command([*mpirun, sys.executable, *argv], **options)


def run_mpich(n: int, argv: Words, **options: Unpack[Options]) -> Finished:
    """`mpiexec -n N python ARGV` of MPICH: its Hydra, under the name Debian gives it."""
    return run_command(["mpiexec.mpich", "-n", str(n), sys.executable, *argv], **options)


def run_srun(n: int, argv: Words, cluster: SlurmCluster, **options: Unpack[Options]) -> Finished:
    """`srun -n N -N 2 python ARGV` on the loopback cluster, from outside any allocation."""
    return cluster.srun(n, [sys.executable, *argv], **options)


def _abort_ranks(process: subprocess.Popen[bytes], mark: str) -> None:
    """SIGABRT to the ends of the process tree; the launcher still forwards what they say."""
    ranks = [pid for pid in processes.leaves(processes.marked(mark)) if pid != process.pid]
    processes.send(ranks or [process.pid], signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=ABORT_GRACE_S)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
