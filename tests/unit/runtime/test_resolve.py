"""Which row wins, and which rows may stand beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigError, LaunchError
from gradsync.runtime.coordinator import System, plan_coordinator
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from gradsync.world import World


def by_hand(rank, size):
    return {"RANK": str(rank), "WORLD_SIZE": str(size)}


def torchrun(rank, size):
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "x"}
    return by_hand(rank, size) | local


def comm_world(prefix, rank, size):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"{prefix}_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def openmpi(rank, size):
    return comm_world("OMPI", rank, size)


def mvapich2(rank, size):
    return comm_world("MV2", rank, size)


def hydra(rank, size):
    local = {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size)}
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size)} | local


def pals(rank, size):
    own = {"PALS_RANKID": str(rank), "PMI_SIZE": str(size)}
    return own | {"PALS_LOCAL_RANKID": str(rank), "PALS_LOCAL_SIZE": str(size)}


def flux(rank, size):
    rows = {"FLUX_TASK_RANK": rank, "FLUX_JOB_SIZE": size, "FLUX_TASK_LOCAL_ID": rank}
    return {name: str(value) for name, value in rows.items()}


def srun(rank, size):
    rows = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": size}
    step = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return step | {name: str(value) for name, value in rows.items()}


MPI = (openmpi, pals, mvapich2, hydra)
MANAGERS = (flux, srun)


def say(family):
    return getattr(family, "__name__", str(family))


@pytest.mark.parametrize("family", [torchrun, *MPI, *MANAGERS], ids=say)
def test_a_family_alone_wins(family):
    resolution = resolve(family(1, 3))
    assert resolution.world.launcher == family.__name__
    assert (resolution.world.rank, resolution.world.world_size) == (1, 3)
    assert "won" in resolution.explain()


def test_nothing_set_is_one_rank():
    resolution = resolve({})
    assert resolution.world.launcher == "python"
    assert resolution.world.world_size == 1
    assert resolution.generation == "0"
    assert resolution.warnings == ()
    assert "no launcher: one rank" in resolution.explain()


@pytest.mark.parametrize("family", [*MPI, *MANAGERS], ids=say)
def test_by_hand_may_repeat_what_the_launcher_says(family):
    assert resolve(family(1, 3) | by_hand(1, 3)).world.launcher == "env"


@pytest.mark.parametrize("family", [*MPI, *MANAGERS], ids=say)
@pytest.mark.parametrize("hand", [(0, 3), (1, 2), (0, 1), (1, 1 + 6)], ids=str)
def test_by_hand_may_not_contradict_a_launcher(family, hand):
    with pytest.raises(LaunchError) as caught:
        resolve(family(1, 3) | by_hand(*hand))
    text = str(caught.value)
    assert "contradict" in text
    assert f"rank {hand[0]} of {hand[1]}" in text
    assert "rank 1 of 3" in text
    assert "env -u RANK -u WORLD_SIZE" in text


@pytest.mark.parametrize("family", [openmpi, *MANAGERS], ids=say)
@given(outer_size=st.integers(1, 5), block=st.integers(2, 4), data=st.data())
def test_by_hand_may_be_nested_in_blocks(family, outer_size, block, data):
    outer = data.draw(st.integers(0, outer_size - 1))
    inner = data.draw(st.integers(0, outer_size * block - 1))
    variables = family(outer, outer_size) | by_hand(inner, outer_size * block)
    if inner // block == outer:
        assert resolve(variables).world.rank == inner
    else:
        with pytest.raises(LaunchError, match="contradict"):
            resolve(variables)


@pytest.mark.parametrize(
    ("one", "other"),
    [(openmpi, mvapich2), (openmpi, hydra), (pals, mvapich2), (mvapich2, hydra), (flux, hydra)],
    ids=say,
)
def test_two_mpi_families_must_agree(one, other):
    assert resolve(one(1, 2) | other(1, 2)).world.launcher == one.__name__
    with pytest.raises(LaunchError, match="contradict"):
        resolve(one(1, 2) | other(0, 2))
    with pytest.raises(LaunchError, match="contradict"):
        resolve(one(1, 2) | other(1, 4))


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_STEP_ID": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "x"},
        {"OMPI_COMM_WORLD_SIZE": "2"} | mvapich2(0, 1),
        {"RANK": "1"} | openmpi(1, 2),
        {"WORLD_SIZE": "2"} | srun(1, 2),
        {"LOCAL_RANK": "0"} | openmpi(1, 2),
    ],
    ids=lambda variables: "+".join(variables)[:60],
)
def test_partly_set_is_an_error_that_shows_every_family(variables):
    with pytest.raises(LaunchError) as caught:
        resolve(variables)
    text = str(caught.value)
    for name in ("env", "openmpi", "pals", "flux", "mvapich2", "hydra", "srun"):
        assert f"\n  {name}" in text or (name == "env" and "\n  torchrun" in text)
    assert "without" in text


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"} | torchrun(1, 2), "torchrun"),  # partly set, outside
        (srun(0, 2) | openmpi(2, 3) | by_hand(2, 3), "env"),  # held against mpirun, not Slurm
        # A wrapper may export the local rank that it was given.
        ({"LOCAL_RANK": "1"} | openmpi(1, 2), "openmpi"),
        ({"LOCAL_RANK": "1"} | srun(1, 2), "srun"),
        # The coordinator alone is no launcher.
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "python"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | openmpi(1, 2), "openmpi"),
        ({"SLURM_STEP_ID": "0"} | openmpi(1, 2), "openmpi"),  # a filtered environment of Slurm
        (srun(1, 2) | {"PMIX_RANK": "1"}, "srun"),  # srun's own PMIx is no family
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value)[:40],
)
def test_what_may_stand_beside_the_winner(variables, launcher):
    assert resolve(variables).world.launcher == launcher


@pytest.mark.parametrize(
    ("variables", "generation"),
    [
        ({}, "0"),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "2"),
        ({"SLURM_RESTART_COUNT": "3"}, "3"),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "3"}, "2"),
        ({"SLURM_RESTART_COUNT": " "}, "0"),
    ],
)
def test_generation(variables, generation):
    assert resolve(variables).generation == generation


def test_a_generation_that_is_no_number_is_refused():
    with pytest.raises(LaunchError, match="SLURM_RESTART_COUNT"):
        resolve({"SLURM_RESTART_COUNT": "often"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NUM_GPUS": "2"}, ("NUM_GPUS=2", "--nproc-per-node 2")),
        ({"NPROC_PER_NODE": "4"}, ("NPROC_PER_NODE=4", "--nproc-per-node 4")),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, ("2 tasks", "`srun`")),
        ({"SLURM_NPROCS": "2"}, ("2 tasks", "`srun`")),
    ],
)
def test_what_was_asked_for_and_is_not_read_is_said(variables, words):
    """One rank runs: as other projects' scripts, and some guides, would start several."""
    (warning,) = resolve(variables).warnings
    assert all(word in warning for word in (*words, "one rank"))
    assert resolve(variables | torchrun(0, 2)).warnings == ()


@pytest.mark.parametrize("value", ["1", "01", "", "all", "-2"])
def test_a_number_that_asks_for_no_more_than_one_rank_is_not_told_of(value):
    assert resolve({"NUM_GPUS": value}).warnings == ()


# -- environments as real launchers set them (Open MPI 4.1, torchrun 2.13, Slurm 22.05), shortened


def env(text):
    return dict(word.split("=", 1) for word in text.split())


MPIRUN = """
OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_APP_CTX_NUM_PROCS=2
OMPI_MCA_ess_base_jobid=2102460417 OMPI_MCA_orte_num_nodes=1
OMPI_MCA_orte_hnp_uri=2102460416.0;tcp://192.0.2.2:57987
OMPI_MCA_orte_precondition_transports=8a274bc7269c84c0-b5035b42b605fa8b
PMIX_HOSTNAME=head PMIX_ID=2102460417.1 PMIX_NAMESPACE=2102460417 PMIX_RANK=1
PMIX_SERVER_TMPDIR=/tmp/ompi.head.0/pid.4527
"""
TORCHRUN = """
RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1
MASTER_ADDR=localhost MASTER_PORT=32857 ROLE_RANK=1 ROLE_WORLD_SIZE=2
TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_USE_AGENT_STORE=True
TORCHELASTIC_RUN_ID=1f74dc67-b2c2-417d-b589-9a985861f13d
"""
SALLOC_SHELL = """
SLURM_CLUSTER_NAME=c SLURM_JOB_ID=7 SLURM_JOB_NAME=interactive SLURM_JOB_NODELIST=n[1-2]
SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=3,1
"""
SBATCH_SHELL = f"""{SALLOC_SHELL} SLURMD_NODENAME=n1 SLURM_GTIDS=0 SLURM_LOCALID=0 SLURM_NODEID=0
SLURM_PROCID=0 SLURM_TASK_PID=5025
"""
SRUN_TASK = f"""{SALLOC_SHELL} SLURM_GTIDS=0,1,2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_PROCID=1
SLURM_STEPID=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2
SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=3,1
"""
SRUN_PMI2_TASK = f"{SRUN_TASK} PMI_FD=13 PMI_JOBID=7.1 PMI_RANK=1 PMI_SIZE=4 "
ONE_TASK_SHELL = """
SLURM_GTIDS=0 SLURM_JOB_ID=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_PROCID=0
SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
SLURM_STEP_TASKS_PER_NODE=1
"""
# Variables that an MPI rank inherits from the Open MPI daemon that srun started, one on each node.
MPI_DAEMON = f"""{SALLOC_SHELL} SLURM_GTIDS=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=1
SLURM_STEP_ID=2 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
SLURM_STEP_TASKS_PER_NODE=1(x2)
"""
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
def test_a_plain_process_in_a_slurm_shell_is_one_rank_and_hears_of_srun(text, caplog):
    with Session(SessionOptions(device="cpu", seed=3), env=env(text)) as world:
        assert (world.world_size, world.seed) == (1, 3)
    assert "has 4 tasks" in caplog.text
    assert "Put `srun` before the command" in caplog.text


def test_a_session_is_no_world():
    session = Session(SessionOptions(device="cpu"), env={})
    with pytest.raises(LaunchError, match="threads must be at least 1; got 0"):
        Session(SessionOptions(threads=0), env={}).open()
    with pytest.raises(ConfigError, match=r"write `with gs\.init"):
        _ = session.world


def test_the_device_is_torchs_and_its_name_a_text() -> None:
    world = World(device_name="cuda:1")
    assert world.device == torch.device("cuda:1")
    assert f"{world.device}" == world.device_name
