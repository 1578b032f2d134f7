"""How ranks find each other, as a plan."""

import os
import subprocess
from types import SimpleNamespace

import psutil
import pytest

from gradsync.errors import LaunchError
from gradsync.runtime.coordinator import System, launcher_ancestor, plan_coordinator
from gradsync.runtime.resolve import resolve


def env(text):
    """`A=1 B=2` as a mapping."""
    return dict(pair.split("=", 1) for pair in text.split())


MPI_LOCAL = "OMPI_COMM_WORLD_LOCAL_RANK={} OMPI_COMM_WORLD_LOCAL_SIZE={}"
ONE_HOST_MPI = env(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=2102460417 "
    "PMIX_SERVER_TMPDIR=/tmp/ompi.head.0/pid.4527 " + MPI_LOCAL.format(1, 2)
)
TWO_HOST_MPI = ONE_HOST_MPI | env(MPI_LOCAL.format(0, 1))
HYDRA = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
ONE_HOST_SRUN = env(
    "SLURM_JOB_ID=1234567 SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=n1"
)
SRUN = ONE_HOST_SRUN | env(
    "SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=n[03-04]"
)
FLUX = env("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0")
BY_HAND = env("RANK=1 WORLD_SIZE=2")
TORCHRUN = BY_HAND | env(
    "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x MASTER_ADDR=localhost MASTER_PORT=40000"
)


def never(*_):
    raise AssertionError("not to be asked")


def plan(env, **functions):
    asked = {"resolve_host": never, "run": never, "ancestor": never}
    return plan_coordinator(env, resolve(env), System(**(asked | functions)))


def answer_or_raise(answer):
    def asked(_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked


unknown_host = answer_or_raise(OSError("Name or service not known"))


def test_one_rank_needs_none():
    assert plan({}).kind == "none"
    assert plan({"MASTER_ADDR": "head"}).kind == "none"


@pytest.mark.parametrize("env", [ONE_HOST_MPI, TWO_HOST_MPI, HYDRA, SRUN, FLUX, BY_HAND])
def test_what_is_given_is_taken(env):
    found = plan(env | {"MASTER_ADDR": "head", "MASTER_PORT": "4711"})
    assert (found.kind, found.address, found.port) == ("given", "head", 4711)
    assert not found.hosted_by_agent


def test_torchruns_store_is_served_by_its_agent_only_if_it_says_so():
    assert plan(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosted_by_agent
    assert not plan(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).hosted_by_agent
    assert not plan(TORCHRUN).hosted_by_agent


def test_by_hand_on_one_host_all_ranks_know_the_port():
    found = plan(BY_HAND)
    assert (found.kind, found.address, found.port) == ("given", "127.0.0.1", 29500)
    assert plan(BY_HAND | {"MASTER_PORT": "4711"}).port == 4711
    assert plan(BY_HAND | {"MASTER_ADDR": "head"}).port == 29500


def test_by_hand_on_several_hosts_the_address_must_be_given():
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        plan(BY_HAND | local)


@pytest.mark.parametrize(
    "env", [ONE_HOST_MPI, ONE_HOST_SRUN, HYDRA], ids=["openmpi", "srun", "hydra"]
)
def test_on_one_host_rank_0_publishes_its_port_in_a_file(env):
    found = plan(env, ancestor=lambda: "77:1")
    assert (found.kind, found.address, found.port) == ("file", "127.0.0.1", 0)
    assert found.key.replace("-", "").isalnum()
    assert found == plan(env, ancestor=lambda: "77:1")


def test_a_port_alone_is_used_on_the_loopback():
    found = plan(ONE_HOST_MPI | {"MASTER_PORT": "4711"})
    assert (found.kind, found.address, found.port) == ("given", "127.0.0.1", 4711)


def test_all_ranks_of_a_job_have_one_key():
    first = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}
    assert plan(ONE_HOST_MPI).key == plan(ONE_HOST_MPI | first).key
    first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "5"}
    assert plan(ONE_HOST_SRUN).key == plan(ONE_HOST_SRUN | first).key


@pytest.mark.parametrize(
    ("env", "change"),
    [
        (ONE_HOST_MPI, {"PMIX_NAMESPACE": "3"}),
        (ONE_HOST_MPI, {"PMIX_SERVER_TMPDIR": "/tmp/ompi.head.0/pid.4528"}),
        (ONE_HOST_MPI, {"OMPI_MCA_orte_precondition_transports": "aa-bb"}),
        (ONE_HOST_SRUN, {"SLURM_JOB_ID": "1234568"}),
        (ONE_HOST_SRUN, {"SLURM_STEP_ID": "3"}),
        (ONE_HOST_SRUN, {"SLURM_CLUSTER_NAME": "other"}),
        (ONE_HOST_SRUN, {"SLURM_RESTART_COUNT": "1"}),
    ],
    ids=lambda value: "+".join(value)[:40],
)
def test_another_job_or_generation_has_another_key(env, change):
    assert plan(env).key != plan(env | change).key


def test_without_a_job_id_the_launching_process_is_the_key():
    assert plan(HYDRA, ancestor=lambda: "77:1").key != plan(HYDRA, ancestor=lambda: "77:2").key
    unnamed = {name: value for name, value in ONE_HOST_MPI.items() if "PMIX" not in name}
    assert plan(unnamed, ancestor=lambda: "1:1").key != plan(unnamed, ancestor=lambda: "2:1").key


def test_over_several_hosts_mpi_broadcasts():
    found = plan(TWO_HOST_MPI)
    assert (found.kind, found.address, found.port) == ("mpi", "", 0)
    assert plan(TWO_HOST_MPI | {"MASTER_PORT": "4711"}).port == 4711


def test_without_the_local_size_several_hosts_need_an_address():
    with pytest.raises(LaunchError, match="none says where rank 0 is; set MASTER_ADDR"):
        plan(FLUX)
    here = plan(FLUX | {"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2"})
    assert here.kind == "file"
    given = plan(FLUX | {"MASTER_ADDR": "head"})
    assert (given.kind, given.address, given.port) == ("given", "head", 29_500)


def test_srun_takes_the_first_host_and_a_port_from_the_job():
    def where(changes):
        found = plan(SRUN | changes, resolve_host=str)
        return found.kind, found.address, found.port

    port = 15000 + (1234567 + 2 * 97) % 10000
    assert where({}) == ("port", "n03", port)
    assert where({"MASTER_PORT": "4711"}) == ("port", "n03", 4711)
    assert where({"MASTER_ADDR": "head"}) == ("given", "head", port)
    assert where({"SLURM_JOB_ID": "1234568"})[2] != port
    assert where({"SLURM_STEP_ID": "3"})[2] != port
    of_the_job = {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "n[07-08]"}
    assert where(of_the_job)[1] == "n07"


def test_scontrol_knows_a_host_that_does_not_resolve():
    asked = []

    def run(argv):
        asked.append(argv)
        return "NodeName=n03 Arch=x86_64\n   NodeAddr=192.0.2.3 NodeHostName=head Port=7821\n"

    assert plan(SRUN, resolve_host=unknown_host, run=run).address == "192.0.2.3"
    assert asked == [["scontrol", "show", "node", "n03"]]


@pytest.mark.parametrize(
    "answer",
    [
        OSError("no scontrol"),
        subprocess.TimeoutExpired("scontrol", 5),
        subprocess.CalledProcessError(1, "scontrol"),
        "NodeName=n03 NodeAddr=$(reboot)",
    ],
    ids=str,
)
def test_without_an_address_the_error_names_the_host(answer):
    with pytest.raises(LaunchError, match=r"'n03' does not resolve.*scontrol.*MASTER_ADDR"):
        plan(SRUN, resolve_host=unknown_host, run=answer_or_raise(answer))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1,n2", "n1"),
        ("n[1-3,07],gpu-[01-02]-x", "n1"),
        ("n[08-10]", "n08"),
        ("m7,n[1,2]", "m7"),
        ("r[1-2]n[1-2],b", "r1n1"),
        ("[1-2].example.org", "1.example.org"),
        ("a_b.c-d", "a_b.c-d"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, first):
    assert plan(SRUN | {"SLURM_STEP_NODELIST": nodes}, resolve_host=str).address == first


@pytest.mark.parametrize("nodes", ["-v", "n1;reboot", "n[1", "a b", "n[a]"])
def test_a_node_list_is_not_trusted(nodes):
    with pytest.raises(LaunchError):
        plan(SRUN | {"SLURM_STEP_NODELIST": nodes}, resolve_host=str)


@pytest.mark.parametrize(
    ("env", "name"),
    [(BY_HAND | {"MASTER_PORT": port}, "MASTER_PORT") for port in ("0", "65536", "-1", "ssh")],
)
def test_a_coordinator_that_is_none_is_refused(env, name):
    with pytest.raises(LaunchError, match=name):
        plan(env)


# -- the launching process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ([("bash", 30), ("hydra_pmi_proxy", 20), ("mpiexec.hydra", 10)], "20"),
        ([("my_launcher", 30), ("mpirunner", 10)], "{parent}"),
        ([], "{parent}"),  # processes that cannot be seen
    ],
)
def test_the_nearest_launcher_counts(parents, expected, monkeypatch):
    above = [SimpleNamespace(name=lambda name=name: name, pid=pid) for name, pid in parents]
    monkeypatch.setattr(psutil.Process, "parents", lambda _: above)
    assert launcher_ancestor() == expected.format(parent=os.getppid())
