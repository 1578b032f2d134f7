"""MPICH beside Open MPI: ranks that Hydra starts; both families over two hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.config_flags import train_arguments
from support.launchers import clean_environment, run_command, run_mpich
from support.namespaces import Host, program, two_hosts
from support.small_run import OneRank, small_config

MEET = """
import os, tempfile
os.environ |= {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}  # alone on its host, it believes
os.environ["TMPDIR"] = tempfile.mkdtemp()  # two lone Open MPIs race for one session directory
from gradsync.errors import RendezvousError
from gradsync.runtime.rendezvous import meet
from gradsync.runtime.resolve import resolve
try:
    meet(os.environ, resolve(os.environ), deadline_s=0)
except RendezvousError as error:
    print(error, flush=True)
"""
OPEN_MPI = {"MPI4PY_LIBMPI": "libmpi.so.40"}
"""Variables by which mpi4py finds Open MPI, whatever this machine calls its MPI."""


@pytest.fixture
def mpich_library(tmp_path: Path) -> dict[str, str]:
    """Variables by which mpi4py finds Debian's MPICH, under the name that its own build has."""
    (library,) = Path("/usr/lib").glob("*/libmpich.so.12")
    (folder := tmp_path / "lib").mkdir()
    (folder / "libmpi.so.12").symlink_to(library)
    return {"MPI4PY_LIBMPI": str(folder / "libmpi.so.12"), "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.launcher("mpich")
def test_hydras_ranks_give_the_bits_of_one(data: Path, one_rank: OneRank, tmp_path: Path) -> None:
    config = small_config(tmp_path, data)
    run_mpich(2, ["-m", "gradsync", *train_arguments(config)]).ok()
    one_rank.check_equal(tmp_path, "hydra")


@pytest.mark.launcher("namespaces")
@pytest.mark.launcher("mpich")
def test_hydras_ranks_on_two_hosts(
    data: Path, one_rank: OneRank, tmp_path: Path, mpich_library: dict[str, str]
) -> None:
    """They meet through mpi4py, on hosts without a default route."""
    argv = [sys.executable, "-m", "gradsync"]
    argv += train_arguments(small_config(tmp_path / "run", data))
    with two_hosts() as hosts:
        shell = remote_shell(tmp_path / "shell", {host.address: host for host in hosts})
        hydra = ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", shell, "-n", "2"]
        hydra += ["-ppn", "1", "-hosts", ",".join(host.address for host in hosts)]
        on_host(hosts[0], "first", [*hydra, *argv], mpich_library)
    one_rank.check_equal(tmp_path / "run", "hydra")


@pytest.mark.launcher("namespaces")
@pytest.mark.launcher("mpirun")
def test_open_mpis_ranks_on_two_hosts(data: Path, one_rank: OneRank, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gradsync"]
    argv += train_arguments(small_config(tmp_path / "run", data))
    with two_hosts() as hosts:
        names = dict(zip(("first", "second"), hosts, strict=True))
        shell = remote_shell(tmp_path / "shell", names)
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        mpirun += ["--mca", "plm_rsh_agent", shell, "-H", "first:1,second:1", "-np", "2"]
        on_host(hosts[0], "first", [*mpirun, *argv], OPEN_MPI)
    one_rank.check_equal(tmp_path / "run", "openmpi")


def remote_shell(path: Path, hosts: Mapping[str, Host]) -> str:
    """A program that is called as ssh is, `[options] HOST COMMAND`, for these names of hosts."""
    cases = "\n".join(f"{name}) net={host.namespace};;" for name, host in hosts.items())
    path.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nname=$1\nshift\n'
        f'case "$name" in\n{cases}\n*) exit 1;;\nesac\n'
        f'exec {program("ip")} netns exec "$net" unshare --uts sh -c "hostname at-$name; $*"\n'
    )
    path.chmod(0o755)
    return str(path)


def on_host(host: Host, name: str, argv: Sequence[str], extra_env: Mapping[str, str]) -> None:
    """Run a command on a host, which gets a name."""
    words = [program("ip") or "ip", "netns", "exec", host.namespace, "unshare", "--uts"]
    words += ["sh", "-c", f'hostname {name}; exec "$@"', "sh", *argv]
    run_command(words, env=clean_environment(extra_env), timeout_s=100).ok()


@pytest.mark.launcher("mpich")
@pytest.mark.launcher("mpirun")
def test_the_library_of_another_mpi_is_named() -> None:
    """mpi4py takes the first library it finds, say Open MPI's: each rank would be rank 0 of 1."""
    done = run_mpich(2, ["-c", MEET], extra_env=OPEN_MPI)
    for rank in (0, 1):
        assert f"rank {rank}: the ranks sit on several hosts" in done.stdout, done.describe()
    assert "mpi4py found another MPI's library, Open MPI v" in done.stdout
    assert "MPI4PY_LIBMPI" in done.stdout
    assert "-genv MASTER_ADDR <host of rank 0>" in done.stdout
