"""Every launcher row: complete, partly set, malformed."""

import pytest

from gradsync.errors import LaunchError
from gradsync.runtime.launchers import (
    PARSERS,
    is_loopback,
    read_hydra,
    read_row,
    read_srun,
    read_torchrun,
)
from gradsync.world import World


def env(text):
    """`A=1 B=2` as a mapping."""
    return dict(pair.split("=", 1) for pair in text.split())


TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x"
OPENMPI = " ".join(
    f"OMPI_COMM_WORLD_{key}"
    for key in ("RANK=5", "SIZE=8", "LOCAL_RANK=1", "LOCAL_SIZE=4", "NODE_RANK=3")
)
MVAPICH2 = OPENMPI.replace("OMPI_", "MV2_")
HYDRA = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4"
CRAY = "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4"
PALS = "PALS_RANKID=5 PMI_SIZE=8 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4"
FLUX = "FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1"
SRUN = (
    "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NUM_NODES=2"
)

read_openmpi, READ_PALS, _, READ_MVAPICH2 = PARSERS[1:5]

# parser, variables, name, are the nodes a guess?
COMPLETE = [
    (read_torchrun, TORCHRUN + " GROUP_RANK=1 GROUP_WORLD_SIZE=2", "torchrun", False),
    (read_torchrun, TORCHRUN, "torchrun", True),
    (read_torchrun, TORCHRUN.replace("TORCHELASTIC_RUN_ID=x", ""), "env", True),
    (read_openmpi, OPENMPI, "openmpi", True),
    (READ_MVAPICH2, MVAPICH2, "mvapich2", True),
    (read_hydra, HYDRA, "hydra", True),
    (read_hydra, CRAY, "hydra", True),
    (READ_PALS, PALS, "pals", True),
    (read_srun, SRUN, "srun", False),
]


@pytest.mark.parametrize(("parser", "text", "name", "guessed"), COMPLETE)
def test_a_complete_row_on_two_hosts(parser, text, name, guessed):
    reading = parser(env(text))
    world = reading.world
    assert (world.rank, world.world_size) == (5, 8)
    assert (world.local_rank, world.local_world_size) == (1, 4)
    assert (world.node_rank, world.num_nodes) == (1, 2)
    assert reading.name == world.launcher == name
    assert (reading.needs_hosts, reading.trust_local) == (guessed, True)


@pytest.mark.parametrize(("parser", "text", "name", "guessed"), COMPLETE)
def test_a_complete_row_reads_no_other_variable_and_no_blank_one(parser, text, name, guessed):
    blank = {"RANK": " ", "OMPI_COMM_WORLD_RANK": "", "PALS_RANKID": "", "MV2_COMM_WORLD_SIZE": ""}
    for other in PARSERS:
        if other is not parser and not (other is read_hydra and parser is READ_PALS):
            reading = other(blank | env(text) if parser is not READ_PALS else env(text))
            assert not reading.world
            assert not reading.missing


ONE_HOST = [
    (read_torchrun, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"),
    (read_torchrun, "RANK=1 WORLD_SIZE=2"),
    (read_torchrun, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1"),
    (read_torchrun, "RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost"),
    (read_torchrun, "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"),
    (read_openmpi, OPENMPI.replace("=5", "=1").replace("=8", "=2").replace("=4", "=2")),
    (read_hydra, HYDRA.replace("=5", "=1").replace("=8", "=2").replace("=4", "=2")),
    (READ_PALS, PALS.replace("=5", "=1").replace("=8", "=2").replace("=4", "=2")),
    (
        read_srun,
        "SLURM_STEP_ID=3 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 "
        "SLURM_STEP_TASKS_PER_NODE=2",
    ),
]


@pytest.mark.parametrize(("parser", "text"), ONE_HOST)
def test_a_complete_row_on_one_host_needs_nothing_more(parser, text):
    reading = parser(env(text))
    world = reading.world
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (1, 2, 1, 2)
    assert (world.node_rank, world.num_nodes) == (0, 1)
    assert not reading.needs_hosts


@pytest.mark.parametrize(
    "text",
    [
        "RANK=3 WORLD_SIZE=4 MASTER_ADDR=head.example.org",
        "RANK=3 WORLD_SIZE=4 MASTER_ADDR=192.0.2.7 LOCAL_RANK=1",
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1",
        "RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
    ],
)
def test_by_hand_with_several_hosts_the_local_rank_must_be_derived(text):
    reading = read_torchrun(env(text))
    assert (reading.world.rank, reading.world.world_size) == (3, 4)
    assert reading.needs_hosts
    assert not reading.trust_local


ROWS = [
    ("mvapich2", MVAPICH2.replace("MV2_COMM_WORLD_LOCAL_SIZE=4", "")),
    ("pals", PALS.replace("PALS_LOCAL_SIZE=4", "")),
    ("flux", FLUX),
]


@pytest.mark.parametrize(("name", "text"), ROWS)
def test_a_row_of_the_table_may_leave_out_the_local_size(name, text):
    here = read_row(name, env(text.replace("=1", "=5")))  # the local rank is the rank
    assert here.world == World(
        rank=5, world_size=8, local_rank=5, local_world_size=8, launcher=name
    )
    assert not here.needs_hosts
    for more in ("", " MASTER_ADDR=head.example.org"):
        reading = read_row(name, env(text + more))
        assert (reading.world.rank, reading.world.world_size) == (5, 8)
        assert (reading.needs_hosts, reading.trust_local) == (True, False)
    assert read_row(name, dict(list(env(text).items())[:2])).missing


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (read_torchrun, TORCHRUN),
        (read_openmpi, OPENMPI.replace("OMPI_COMM_WORLD_NODE_RANK=3", "")),
        (read_hydra, HYDRA),
        (read_srun, SRUN.replace("SLURM_STEP_NUM_NODES=2", "")),
    ],
)
def test_every_variable_of_a_row_is_needed(parser, text):
    whole = env(text)
    marks = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"}
    for name in set(whole) - marks:
        reading = parser({key: value for key, value in whole.items() if key != name})
        assert reading.missing
        assert name in reading.missing
        assert name in reading.says()


def test_by_hand_the_local_variables_alone_are_partly_set():
    for text in ("RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1 LOCAL_RANK=0"):
        assert read_torchrun(env(text)).missing
    assert not read_torchrun(env("MASTER_ADDR=h MASTER_PORT=1")).missing


@pytest.mark.parametrize("bad", ["x", "1.0", "9" * 40])
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (read_torchrun, TORCHRUN),
        (read_openmpi, OPENMPI),
        (READ_MVAPICH2, MVAPICH2),
        (read_hydra, HYDRA),
        (read_srun, SRUN),
    ],
)
def test_a_value_that_is_no_integer_is_named(parser, text, bad):
    unread = ("SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "TORCHELASTIC_RUN_ID")
    for name in parser(env(text)).seen:
        if name[0] not in unread:
            with pytest.raises(LaunchError, match=rf"{name[0]}='{bad[:80]}'"):
                parser(env(text) | {name[0]: bad})


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (read_torchrun, "RANK=2 WORLD_SIZE=2"),
        (read_torchrun, "RANK=-1 WORLD_SIZE=2"),
        (read_torchrun, "RANK=0 WORLD_SIZE=999999999999"),
        (read_srun, SRUN.replace("=8", "=1800000000").replace("4(x2)", "900000000(x2)")),
        (read_torchrun, "RANK=0 WORLD_SIZE=0"),
        (read_openmpi, OPENMPI.replace("LOCAL_SIZE=4", "LOCAL_SIZE=0")),
        (read_hydra, HYDRA.replace("MPI_LOCALRANKID=1", "MPI_LOCALRANKID=4")),
        (read_srun, SRUN.replace("NODEID=1", "NODEID=2")),
        (read_srun, SRUN.replace("4(x2)", "4(x3)")),
        (read_srun, SRUN.replace("4(x2)", "3,4")),
        (read_srun, SRUN.replace("NUM_NODES=2", "NUM_NODES=3")),
        (read_srun, SRUN.replace("4(x2)", "four")),
        (read_srun, SRUN.replace("4(x2)", "4x2")),
        (read_srun, SRUN.replace("4(x2)", "4(x70000)")),
    ],
)
def test_numbers_that_describe_no_run_are_refused(parser, text):
    with pytest.raises(LaunchError):
        parser(env(text))


def test_uneven_ranks_on_hosts_stay_a_guess_that_is_legal():
    uneven = OPENMPI.replace("WORLD_SIZE=8", "WORLD_SIZE=7")
    reading = read_openmpi(env(uneven))
    assert reading.needs_hosts
    assert reading.world.world_size == 7


def test_srun_takes_the_local_size_of_its_own_node():
    text = SRUN.replace("4(x2)", "5,3").replace("LOCALID=1", "LOCALID=0")
    assert read_srun(env(text)).world.local_world_size == 3


@pytest.mark.parametrize(
    "step", ["4294967290", "4294967291", "4294967292", "batch", "extern", "-2"]
)
def test_a_shells_own_step_is_none(step):
    reading = read_srun(env(SRUN) | {"SLURM_STEP_ID": step})
    assert not reading.world
    assert not reading.missing


def test_a_step_inherited_by_sbatch_is_none():
    """The shell of an sbatch that a task submitted: the step's variables, but its own GTIDS."""
    inherited = env(SRUN) | {"SLURM_GTIDS": "0"}
    assert not read_srun(inherited).world
    assert read_srun(inherited | {"SLURM_GTIDS": "4,5,6,7"}).world


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        ("srun", SRUN + " PMI_RANK=5 PMI_SIZE=8"),
        ("srun", SRUN + " PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4"),
        ("flux", FLUX + " FLUX_JOB_ID=f1 PMI_RANK=5 PMI_SIZE=8"),
        ("pals", PALS + " PMI_RANK=5"),
    ],
)
def test_pmi_variables_of_a_manager_are_not_hydras(owner, text):
    reading = read_hydra(env(text))
    assert not reading.world
    assert not reading.missing
    assert owner in reading.says()


def test_pmi_variables_that_nobody_explains_are_partly_set():
    assert read_hydra(env("PMI_RANK=0 PMI_SIZE=2")).missing
    assert read_hydra(env(SRUN + " PMI_RANK=4 PMI_SIZE=8")).missing


def test_loopback_addresses():
    for address in ("", "localhost", "127.0.0.1", "127.3.2.1", "::1"):
        assert is_loopback(address)
    for address in ("192.0.2.1", "head", "localhost.example.org", "::"):
        assert not is_loopback(address)
