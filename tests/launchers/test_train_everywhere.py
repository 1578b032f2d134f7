"""The same training run under every launcher: the same numbers, the same files, the same ending."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from support.config_flags import train_arguments
from support.fork_server import run_forked
from support.launchers import run_command, run_mpirun, run_srun, run_torchrun
from support.slurm_cluster import SlurmCluster
from support.small_run import OneRank, small_config

MODULE = ["-m", "gradsync"]


@pytest.mark.launcher("torchrun")
def test_torchrun_gives_the_same_numbers(data: Path, one_rank: OneRank, tmp_path: Path) -> None:
    run_torchrun(2, [*MODULE, *train_arguments(small_config(tmp_path, data))]).ok()
    one_rank.check_equal(tmp_path, "torchrun")


@pytest.mark.launcher("mpirun")
def test_mpirun_gives_the_same_numbers(data: Path, one_rank: OneRank, tmp_path: Path) -> None:
    run_mpirun(2, [*MODULE, *train_arguments(small_config(tmp_path, data))]).ok()
    one_rank.check_equal(tmp_path, "openmpi")


@pytest.mark.launcher("slurm")
def test_srun_on_two_nodes_gives_the_same_numbers(
    slurm: SlurmCluster, data: Path, one_rank: OneRank, tmp_path: Path
) -> None:
    run_srun(2, [*MODULE, *train_arguments(small_config(tmp_path, data))], slurm).ok()
    one_rank.check_equal(tmp_path, "srun")


def test_our_launcher_gives_the_same_numbers_though_the_reader_of_its_output_goes_away(
    data: Path, one_rank: OneRank, tmp_path: Path
) -> None:
    arguments = shlex.join(train_arguments(small_config(tmp_path, data, nproc_per_node=2)))
    command = f"{sys.executable} -m gradsync {arguments} | head -1; exit ${{PIPESTATUS[0]}}"
    run_command(["bash", "-c", command]).ok()
    one_rank.check_equal(tmp_path, "torchrun")


def test_one_rank_without_a_launcher(one_rank: OneRank) -> None:
    one_rank.check_equal(one_rank.out, "python", world_size=1)
    assert "1 thread a rank" in one_rank.printed
    assert "8 micro-batches x 2 samples x 16 tokens" in one_rank.printed
    assert "\x1b[" not in one_rank.printed  # no colours in a file


@pytest.mark.launcher("mpirun")
def test_bad_configuration_is_said_once(data: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, data)
    done = run_mpirun(2, [*MODULE, *train_arguments(config), "--tokens-per-update", "33"])
    assert done.returncode == 2
    assert done.stderr.count("gradsync: error:") == 1
    assert "Traceback" not in done.stderr


def test_an_output_directory_that_cannot_be_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        (done,) = run_forked([*MODULE, *train_arguments(small_config(out, data))])
        assert done.returncode == 2
        assert f"--out {out}" in done.stderr
        assert "Traceback" not in done.stderr


def doctors(slurm: SlurmCluster, command: str) -> list[dict[str, Any]]:
    """The doctor's report of each process that `command` starts in a batch job for four tasks."""
    script = f"#!/bin/bash\n{command} {sys.executable} -m gradsync doctor --launcher --json\n"
    done = slurm.sbatch_script(script, flags=["--ntasks=4", "--nodes=2"]).ok()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.launcher("slurm")
def test_a_plain_process_in_an_sbatch_shell_is_one_rank(slurm: SlurmCluster) -> None:
    (seen,) = doctors(slurm, "")
    assert (seen["world"]["launcher"], seen["world"]["world_size"]) == ("python", 1)
    assert "Put `srun` before the command to use all 4" in seen["warnings"][0]


@pytest.mark.launcher("slurm")
@pytest.mark.launcher("mpirun")
def test_mpirun_inside_an_allocation_wins_over_slurm(slurm: SlurmCluster) -> None:
    root = "--allow-run-as-root" if os.geteuid() == 0 else ""
    ranks = doctors(
        slurm, f"mpirun {root} --oversubscribe --mca ras ^slurm --mca plm isolated -np 2"
    )
    worlds = sorted((seen["world"]["launcher"], seen["world"]["rank"]) for seen in ranks)
    assert worlds == [("openmpi", 0), ("openmpi", 1)]
    assert ranks[0]["coordinator"] == ranks[1]["coordinator"]  # they will meet
    assert ranks[0]["coordinator"]["kind"] == "file"


@pytest.mark.launcher("torchrun")
def test_torchrun_restarts_after_a_kill(tmp_path: Path) -> None:
    """The agent's store outlives the killed generation; its keys must not meet the new one's."""
    script = tmp_path / "killed_once.py"
    script.write_text(
        "import os, signal\n"
        "import torch\n"
        "import gradsync as gs\n"
        "from gradsync.comm.groups import communicator\n"
        "generation = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "with gs.init() as world:\n"
        "    x = torch.ones(2)\n"
        "    communicator(world).all_reduce(x).wait()\n"
        "    if (generation, world.rank) == ('0', 1):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    communicator(world).all_reduce(x).wait()\n"
        "    print(f'rank {world.rank} generation {generation} sum {x[0].item()}', flush=True)\n"
    )
    done = run_torchrun(2, [script], flags=("--standalone", "--max-restarts=1")).ok()
    assert "rank 0 generation 1 sum 4.0" in done.stdout
    assert "rank 1 generation 1 sum 4.0" in done.stdout
