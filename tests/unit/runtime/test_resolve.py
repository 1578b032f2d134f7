"""Which row wins, and which rows may stand beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import LaunchError
from gradsync.runtime.resolve import explain_world, resolve


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
def test_torchrun_wins_over_anything(family):
    resolution = resolve(family(0, 7) | torchrun(1, 2))
    assert resolution.world.launcher == "torchrun"
    assert resolution.world.rank == 1


def test_torchrun_wins_over_a_partly_set_family():
    assert resolve({"OMPI_COMM_WORLD_RANK": "4"} | torchrun(1, 2)).world.launcher == "torchrun"


@pytest.mark.parametrize("inner", MPI, ids=say)
@pytest.mark.parametrize("outer", [(0, 1), (1, 2), (3, 4)], ids=str)
def test_mpi_wins_over_slurm_whatever_slurm_says(inner, outer):
    """Open MPI's daemons are a step of their own, and ranks inherit its numbers."""
    resolution = resolve(srun(*outer) | inner(2, 3))
    assert resolution.world.launcher == inner.__name__
    assert "outer layer" in resolution.explain()


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


def test_by_hand_inside_mpirun_inside_slurm_is_held_against_mpirun():
    resolution = resolve(srun(0, 2) | openmpi(2, 3) | by_hand(2, 3))
    assert resolution.world.launcher == "env"


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


def test_a_wrapper_may_export_the_local_rank_it_was_given():
    assert resolve({"LOCAL_RANK": "1"} | openmpi(1, 2)).world.launcher == "openmpi"
    assert resolve({"LOCAL_RANK": "1"} | srun(1, 2)).world.launcher == "srun"


def test_the_coordinator_alone_is_no_launcher():
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert resolve(variables).world.launcher == "python"
    assert resolve(variables | openmpi(1, 2)).world.launcher == "openmpi"


def test_a_filtered_slurm_environment_does_not_disturb_an_mpi_rank():
    assert resolve({"SLURM_STEP_ID": "0"} | openmpi(1, 2)).world.launcher == "openmpi"


def test_pmix_variables_of_srun_are_no_family():
    assert resolve(srun(1, 2) | {"PMIX_RANK": "1"}).world.launcher == "srun"


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


def test_explain_world_shows_rows_world_and_warnings():
    text = explain_world({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"})
    assert "launcher=python" in text
    assert "warning: this Slurm job has 8 tasks" in text
    text = explain_world(srun(0, 1) | openmpi(1, 2))
    assert "rank=1(2)" in text
    assert "outer layer of openmpi" in text


def test_explain_world_reads_this_process_by_default(monkeypatch):
    for name, value in openmpi(1, 2).items():
        monkeypatch.setenv(name, value)
    assert "launcher=openmpi" in explain_world()
