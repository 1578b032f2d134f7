"""The loopback Slurm behaves like a real one, in the variables that gradsync relies on."""

import json
import sys
from pathlib import Path

import pytest

from support import processes
from support.launchers import Finished
from support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.launcher("srun")

DUMP = """
import json, os
with open(f"{os.environ['DUMP_FOLDER']}/{os.getpid()}", "w") as file:
    json.dump(dict(os.environ), file)
"""


STEP_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
)


class Dumper:
    """Makes tasks write their environment to files (on stdout, long lines of two tasks mix)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.extra_env = {"DUMP_FOLDER": str(folder)}
        script = folder.with_suffix(".py")
        script.write_text(DUMP)
        self.argv = (sys.executable, str(script))

    def environments(self, done: Finished) -> list[dict[str, str]]:
        """Each task's environment, in order of its `SLURM_PROCID`."""
        done.ok()
        found = [json.loads(path.read_text()) for path in self.folder.iterdir()]
        return sorted(found, key=lambda env: int(env.get("SLURM_PROCID", 0)))


@pytest.fixture
def dump(tmp_path: Path) -> Dumper:
    folder = tmp_path / "dump"
    folder.mkdir()
    return Dumper(folder)


def test_a_step_on_two_nodes(slurm: SlurmCluster, dump: Dumper) -> None:
    tasks = dump.environments(slurm.srun(2, dump.argv, extra_env=dump.extra_env))
    assert [[env[name] for name in STEP_VARIABLES] for env in tasks] == [
        ["0", "2", "n[1-2]", "2", "1(x2)", "0", "0", "0"],
        ["0", "2", "n[1-2]", "2", "1(x2)", "1", "0", "1"],
    ]
    assert [env["SLURMD_NODENAME"] for env in tasks] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("tasks", "nodes", "places", "per_node"),
    [
        (3, 2, ["0 0 0", "1 0 1", "2 1 0"], "2,1"),
        (4, 1, ["0 0 0", "1 0 1", "2 0 2", "3 0 3"], "4"),  # needs no four cores
    ],
)
def test_uneven_steps(
    tasks: int, nodes: int, places: list[str], per_node: str, slurm: SlurmCluster, dump: Dumper
) -> None:
    seen = dump.environments(slurm.srun(tasks, dump.argv, nodes=nodes, extra_env=dump.extra_env))
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    assert [" ".join(env[name] for name in names) for env in seen] == places
    assert {env["SLURM_STEP_TASKS_PER_NODE"] for env in seen} == {per_node}


def test_pmi2_adds_pmi_variables_to_the_step(slurm: SlurmCluster, dump: Dumper) -> None:
    tasks = dump.environments(
        slurm.srun(2, dump.argv, flags=["--mpi=pmi2"], extra_env=dump.extra_env)
    )
    assert [(env["PMI_RANK"], env["PMI_SIZE"]) for env in tasks] == [("0", "2"), ("1", "2")]
    assert [env["SLURM_PROCID"] for env in tasks] == ["0", "1"]


def test_nothing_is_left_of_a_cluster(tmp_path: Path) -> None:
    with SlurmCluster() as cluster:
        cluster.command(["sbatch", "--wrap=sleep 1000", "--output=/dev/null"]).ok()
        assert cluster.root.exists()
    assert not cluster.root.exists()
    assert processes.marked(f"SLURM_CONF={cluster.env['SLURM_CONF']}") == []
