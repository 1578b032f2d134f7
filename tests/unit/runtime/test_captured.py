"""Environments as real launchers set them (Open MPI 4.1, torchrun 2.13, Slurm 22.05), shortened."""

import pytest

from gradsync.runtime.coordinator import System, plan_coordinator
from gradsync.runtime.resolve import resolve


def env(text):
    return dict(line.split("=", 1) for line in text.split("\n") if line)


MPIRUN = """
OMPI_APP_CTX_NUM_PROCS=2
OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=2
OMPI_COMM_WORLD_NODE_RANK=1
OMPI_COMM_WORLD_RANK=1
OMPI_COMM_WORLD_SIZE=2
OMPI_MCA_ess_base_jobid=2102460417
OMPI_MCA_orte_hnp_uri=2102460416.0;tcp://192.0.2.2:57987
OMPI_MCA_orte_num_nodes=1
OMPI_MCA_orte_precondition_transports=8a274bc7269c84c0-b5035b42b605fa8b
PMIX_HOSTNAME=head
PMIX_ID=2102460417.1
PMIX_NAMESPACE=2102460417
PMIX_RANK=1
PMIX_SERVER_TMPDIR=/tmp/ompi.head.0/pid.4527
"""

TORCHRUN = """
GROUP_RANK=0
GROUP_WORLD_SIZE=1
LOCAL_RANK=1
LOCAL_WORLD_SIZE=2
MASTER_ADDR=localhost
MASTER_PORT=32857
RANK=1
ROLE_RANK=1
ROLE_WORLD_SIZE=2
TORCHELASTIC_MAX_RESTARTS=3
TORCHELASTIC_RESTART_COUNT=1
TORCHELASTIC_RUN_ID=1f74dc67-b2c2-417d-b589-9a985861f13d
TORCHELASTIC_USE_AGENT_STORE=True
WORLD_SIZE=2
"""

SALLOC_SHELL = """
SLURM_CLUSTER_NAME=c
SLURM_JOB_ID=7
SLURM_JOB_NAME=interactive
SLURM_JOB_NODELIST=n[1-2]
SLURM_JOB_NUM_NODES=2
SLURM_NNODES=2
SLURM_NPROCS=4
SLURM_NTASKS=4
SLURM_TASKS_PER_NODE=3,1
"""

SBATCH_SHELL = (
    SALLOC_SHELL
    + """
SLURMD_NODENAME=n1
SLURM_GTIDS=0
SLURM_LOCALID=0
SLURM_NODEID=0
SLURM_PROCID=0
SLURM_TASK_PID=5025
"""
)

SRUN_TASK = (
    SALLOC_SHELL
    + """
SLURM_GTIDS=0,1,2
SLURM_LOCALID=1
SLURM_NODEID=0
SLURM_PROCID=1
SLURM_STEPID=1
SLURM_STEP_ID=1
SLURM_STEP_NODELIST=n[1-2]
SLURM_STEP_NUM_NODES=2
SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=3,1
"""
)

SRUN_PMI2_TASK = SRUN_TASK + "PMI_FD=13\nPMI_JOBID=7.1\nPMI_RANK=1\nPMI_SIZE=4\n"

ONE_TASK_SHELL = """
SLURM_GTIDS=0
SLURM_JOB_ID=8
SLURM_LOCALID=0
SLURM_NODEID=0
SLURM_NTASKS=1
SLURM_PROCID=0
SLURM_STEP_ID=0
SLURM_STEP_NODELIST=n1
SLURM_STEP_NUM_NODES=1
SLURM_STEP_NUM_TASKS=1
SLURM_STEP_TASKS_PER_NODE=1
"""

# What an MPI rank inherits from the Open MPI daemon that srun started, one on each node.
MPI_DAEMON = (
    SALLOC_SHELL
    + """
SLURM_GTIDS=1
SLURM_LOCALID=0
SLURM_NODEID=1
SLURM_PROCID=1
SLURM_STEP_ID=2
SLURM_STEP_NODELIST=n[1-2]
SLURM_STEP_NUM_NODES=2
SLURM_STEP_NUM_TASKS=2
SLURM_STEP_TASKS_PER_NODE=1(x2)
"""
)

MPIRUN_OF_5 = MPIRUN.replace("WORLD_SIZE=2", "WORLD_SIZE=5").replace("WORLD_RANK=1", "WORLD_RANK=4")


@pytest.mark.parametrize(
    ("text", "launcher", "ranks", "node", "kind"),
    [
        (MPIRUN, "openmpi", (1, 2, 1, 2), (0, 1), "file"),
        (TORCHRUN, "torchrun", (1, 2, 1, 2), (0, 1), "given"),
        (SALLOC_SHELL, "python", (0, 1, 0, 1), (0, 1), "none"),
        (SBATCH_SHELL, "python", (0, 1, 0, 1), (0, 1), "none"),
        (SRUN_TASK, "srun", (1, 4, 1, 3), (0, 2), "port"),
        (SRUN_PMI2_TASK, "srun", (1, 4, 1, 3), (0, 2), "port"),
        (ONE_TASK_SHELL, "srun", (0, 1, 0, 1), (0, 1), "none"),
        (SBATCH_SHELL + MPIRUN, "openmpi", (1, 2, 1, 2), (0, 1), "file"),
        (MPI_DAEMON + MPIRUN_OF_5, "openmpi", (4, 5, 1, 2), (2, 3), "mpi"),
        (ONE_TASK_SHELL + MPIRUN, "openmpi", (1, 2, 1, 2), (0, 1), "file"),
        (SRUN_TASK + TORCHRUN, "torchrun", (1, 2, 1, 2), (0, 1), "given"),
        (SBATCH_SHELL + TORCHRUN, "torchrun", (1, 2, 1, 2), (0, 1), "given"),
        (MPIRUN_OF_5 + TORCHRUN, "torchrun", (1, 2, 1, 2), (0, 1), "given"),
    ],
)
def test_a_real_environment(text, launcher, ranks, node, kind):
    resolution = resolve(env(text))
    world = resolution.world
    assert world.launcher == launcher
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == ranks
    assert (world.node_rank, world.num_nodes) == node
    plan = plan_coordinator(env(text), resolution, System(resolve_host=str))
    assert plan.kind == kind


@pytest.mark.parametrize("text", [SALLOC_SHELL, SBATCH_SHELL])
def test_a_plain_process_in_a_slurm_shell_is_one_rank_and_hears_of_srun(text):
    (warning,) = resolve(env(text)).warnings
    assert "srun" in warning
    assert "4 tasks" in warning


@pytest.mark.parametrize("text", [SRUN_TASK, ONE_TASK_SHELL, SBATCH_SHELL + MPIRUN, TORCHRUN, ""])
def test_nobody_else_is_warned(text):
    assert resolve(env(text)).warnings == ()


def test_a_slurm_job_of_one_task_is_not_warned():
    assert resolve(env("SLURM_JOB_ID=1\nSLURM_NTASKS=1")).warnings == ()


def test_torchruns_restart_count_is_the_generation():
    assert resolve(env(TORCHRUN)).generation == "1"


def test_the_agents_store_is_not_ours_to_serve():
    plan = plan_coordinator(env(TORCHRUN), resolve(env(TORCHRUN)))
    assert plan.hosted_by_agent
    assert (plan.address, plan.port) == ("localhost", 32857)
