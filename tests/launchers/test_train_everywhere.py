"""The same training run under every launcher: the same numbers, the same files, the same ending."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.config_flags import train_arguments
from support.launchers import (
    clean_environment,
    run_command,
    run_mpirun,
    run_python,
    run_srun,
    run_torchrun,
)
from support.slurm_cluster import SlurmCluster
from support.small_run import losses, make_data, small_config

MODULE = ["-m", "gradsync"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two ranks that gradsync started itself."""
    out = tmp_path_factory.mktemp("reference")
    config = small_config(out, data, nproc_per_node=2)
    run_python([*MODULE, *train_arguments(config)]).ok()
    return out


def summary_of(out: Path) -> dict[str, object]:
    return json.loads((out / "summary.json").read_text())


def check_same_numbers(out: Path, reference: Path, launcher: str, world_size: int = 2) -> None:
    """Bit for bit, whatever the launcher and the number of ranks: the default is `invariant`."""
    expected, got = summary_of(reference), summary_of(out)
    assert got["launcher"] == launcher
    assert got["world_size"] == world_size
    assert got["final_train_loss"] == expected["final_train_loss"]
    assert got["weights_sha256"] == expected["weights_sha256"]
    assert losses(out) == losses(reference)
    assert json.loads((out / "exit.json").read_text())["exit_code"] == 0


@pytest.mark.launcher("torchrun")
def test_torchrun_gives_the_same_numbers(data: Path, reference: Path, tmp_path: Path) -> None:
    run_torchrun(3, [*MODULE, *train_arguments(small_config(tmp_path, data))]).ok()
    check_same_numbers(tmp_path, reference, "torchrun", world_size=3)


@pytest.mark.launcher("mpirun")
def test_mpirun_gives_the_same_numbers(data: Path, reference: Path, tmp_path: Path) -> None:
    run_mpirun(2, [*MODULE, *train_arguments(small_config(tmp_path, data))]).ok()
    check_same_numbers(tmp_path, reference, "openmpi")


@pytest.mark.launcher("slurm")
def test_srun_on_two_nodes_gives_the_same_numbers(
    slurm: SlurmCluster, data: Path, reference: Path, tmp_path: Path
) -> None:
    run_srun(2, [*MODULE, *train_arguments(small_config(tmp_path, data))], slurm).ok()
    check_same_numbers(tmp_path, reference, "srun")


def test_one_rank_without_a_launcher(data: Path, reference: Path, tmp_path: Path) -> None:
    # Nobody says how many threads: the command pins one, or a lone rank would take all cores.
    config = small_config(tmp_path, data, threads=None)
    done = run_python([*MODULE, *train_arguments(config)]).ok()
    check_same_numbers(tmp_path, reference, "python", world_size=1)
    assert "1 thread(s) a rank" in done.stdout
    assert "8 leaves x 2 samples x 16 tokens" in done.stdout
    assert "\x1b[" not in done.stdout  # no colours in a file


@pytest.mark.launcher("mpirun")
def test_bad_configuration_is_said_once(data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data)
    done = run_mpirun(3, [*MODULE, *train_arguments(config), "--tokens-per-update", "64"])
    assert done.returncode == 2
    assert done.stderr.count("gradsync: error:") == 1
    assert "Traceback" not in done.stderr


def wait_for_metrics(process: subprocess.Popen[str], out: Path) -> None:
    """Return once the run has logged two steps."""
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_to_the_launcher_saves_and_the_same_command_goes_on(
    data: Path, reference: Path, tmp_path: Path
) -> None:
    """A long run is told to stop once it has logged two steps; a third of it is enough to see."""
    config = small_config(tmp_path, data, nproc_per_node=2, steps=100_000)
    argv = [sys.executable, *MODULE, *train_arguments(config)]
    process = subprocess.Popen(
        argv, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_metrics(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    assert "stopped by" in printed
    note = json.loads((tmp_path / "exit.json").read_text())
    assert note["exit_code"] == 75
    stopped_at = summary_of(tmp_path)["steps"]
    assert isinstance(stopped_at, int)

    again = small_config(tmp_path, data, nproc_per_node=2, steps=stopped_at + 2)
    done = run_python([*MODULE, *train_arguments(again)]).ok()
    assert f"(step {stopped_at})" in done.stdout
    assert summary_of(tmp_path)["steps"] == stopped_at + 2


def by_hand(rank: int, world_size: int, port: int, argv: list[str]) -> subprocess.Popen[str]:
    """One rank started as a person would in a terminal of their own."""
    env = clean_environment(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    return subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_killed_rank_is_named_by_the_others(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "from gradsync.cli.main import main\n"
        "from gradsync.train.loop import Trainer\n"
        "step = Trainer._train_step\n"
        "def killed(self, *rest):\n"
        "    if (self.world.rank, rest[0].number) == (1, 3):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, *rest)\n"
        "Trainer._train_step = killed\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [str(script), *train_arguments(small_config(tmp_path / "run", data))]
    port = free_port()
    ranks = [by_hand(rank, 3, port, argv) for rank in range(3)]
    ends = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1]
    for survivor in (0, 2):
        assert "rank(s) 1 vanished without a word" in ends[survivor], ends[survivor]
    note = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert note["exit_code"] == 1
    assert "rank(s) 1 vanished" in note["error"]


def test_a_rank_killed_under_our_launcher_is_named(data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data, nproc_per_node=2, steps=100_000)
    argv = [sys.executable, *MODULE, *train_arguments(config)]
    process = subprocess.Popen(
        argv, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_metrics(process, tmp_path)
    (victim,) = (
        child
        for child in psutil.Process(process.pid).children()
        if child.environ().get("RANK") == "1"
    )
    victim.kill()
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "gradsync: error: rank 1 was ended by SIGKILL" in printed
    assert "rank(s) 1 vanished without a word" in printed
    assert "Traceback" not in printed


def test_a_reader_that_goes_away_does_not_end_the_training(data: Path, tmp_path: Path) -> None:
    arguments = shlex.join(train_arguments(small_config(tmp_path, data, nproc_per_node=2)))
    command = f"{sys.executable} -m gradsync {arguments} | head -1; exit ${{PIPESTATUS[0]}}"
    done = run_command(["bash", "-c", command])
    assert done.returncode == 0, done.describe()
    assert summary_of(tmp_path)["steps"] == 6


def test_an_output_directory_that_cannot_be_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        done = run_python([*MODULE, *train_arguments(small_config(out, data))])
        assert done.returncode == 2
        assert f"--out {out}" in done.stderr
        assert "Traceback" not in done.stderr


def test_missing_ranks_are_named_after_a_bounded_wait(data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data, rendezvous_timeout_s=1.5)
    rank = by_hand(0, 3, free_port(), [*MODULE, *train_arguments(config)])
    _, printed = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert "rank 0 waited in vain for rank(s) 1, 2 of 3" in printed


def test_an_unreachable_coordinator_is_named(data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data, rendezvous_timeout_s=1.5)
    port = free_port()
    rank = by_hand(1, 2, port, [*MODULE, *train_arguments(config)])
    _, printed = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert f"rank 1 could not reach the coordinator at 127.0.0.1:{port}" in printed


def test_a_server_that_is_no_store_is_named(data: Path, tmp_path: Path) -> None:
    """Torch's own client would wait for ever for an answer."""
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = small_config(tmp_path, data, rendezvous_timeout_s=1.5)
        rank = by_hand(1, 2, port, [*MODULE, *train_arguments(config)])
        _, printed = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert f"what answers at 127.0.0.1:{port} is no rendezvous store" in printed


def test_a_taken_port_is_named(data: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        argv = [*MODULE, *train_arguments(small_config(tmp_path, data))]
        rank = by_hand(0, 2, port, argv)
        _, printed = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert f"port {port} on 127.0.0.1 is already in use" in printed


@pytest.mark.launcher("mpirun")
def test_mpirun_over_several_hosts_meets_through_mpi4py(
    data: Path, reference: Path, tmp_path: Path
) -> None:
    """Each rank is made to believe that it is alone on its host."""
    script = tmp_path / "far.py"
    script.write_text(
        "import os, sys\n"
        "os.environ |= {'OMPI_COMM_WORLD_LOCAL_SIZE': '1', 'OMPI_COMM_WORLD_LOCAL_RANK': '0'}\n"
        "from gradsync.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    out = tmp_path / "run"
    run_mpirun(2, [str(script), *train_arguments(small_config(out, data))]).ok()
    check_same_numbers(out, reference, "openmpi")


@pytest.mark.launcher("slurm")
def test_a_plain_process_in_an_sbatch_shell_is_one_rank(
    slurm: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    arguments = shlex.join(train_arguments(small_config(tmp_path, data, steps=1)))
    script = f"#!/bin/bash\n{sys.executable} -m gradsync {arguments}\n"
    done = slurm.sbatch_script(script, options=["--ntasks=2", "--nodes=2"])
    assert done.returncode == 0, done.describe()
    assert "Put `srun` before the command" in done.stdout + done.stderr
    assert summary_of(tmp_path)["world_size"] == 1


@pytest.mark.launcher("slurm")
@pytest.mark.launcher("mpirun")
def test_mpirun_inside_an_allocation_wins_over_slurm(
    slurm: SlurmCluster, data: Path, reference: Path, tmp_path: Path
) -> None:
    arguments = shlex.join(train_arguments(small_config(tmp_path, data)))
    root = "--allow-run-as-root" if os.geteuid() == 0 else ""
    mpirun = f"mpirun {root} --oversubscribe --mca ras ^slurm --mca plm isolated -np 2"
    script = f"#!/bin/bash\n{mpirun} {sys.executable} -m gradsync {arguments}\n"
    done = slurm.sbatch_script(script, options=["--ntasks=4", "--nodes=2"])
    assert done.returncode == 0, done.describe()
    assert summary_of(tmp_path)["launcher"] == "openmpi"
    assert losses(tmp_path) == losses(reference)


@pytest.mark.launcher("torchrun")
def test_torchrun_restarts_after_a_kill(tmp_path: Path) -> None:
    """The agent's store outlives the killed generation; its keys must not meet the new one's."""
    script = tmp_path / "killed_once.py"
    script.write_text(
        "import os, signal\n"
        "import torch\n"
        "import gradsync as gs\n"
        "from gradsync.comm.choose import communicator\n"
        "generation = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "with gs.init() as world:\n"
        "    x = torch.ones(2)\n"
        "    communicator(world).all_reduce(x).wait()\n"
        "    if (generation, world.rank) == ('0', 1):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    communicator(world).all_reduce(x).wait()\n"
        "    print(f'rank {world.rank} generation {generation} sum {x[0].item()}', flush=True)\n"
    )
    done = run_torchrun(2, [script], options=("--standalone", "--max-restarts=1")).ok()
    assert "rank 0 generation 1 sum 4.0" in done.stdout
    assert "rank 1 generation 1 sum 4.0" in done.stdout
