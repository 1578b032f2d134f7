"""`gradsync doctor`: its parts, and what facts about a machine mean, by table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gradsync.commands.cli import doctor
from gradsync.commands.cli.doctor import Finding, gather, judge, judge_alike, judge_ranks
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.errors import LaunchError
from gradsync.runtime import environ
from gradsync.world import World

MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1",
}


@pytest.fixture
def under_mpirun(monkeypatch):
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("under_mpirun")
def test_the_launcher_part_says_which_row_won_and_why(capsys):
    assert doctor.run(["--launcher"]) == 0
    out = capsys.readouterr().out
    assert "openmpi   rank 1 of 2, local rank 1 of 2  won" in out
    assert "rank=1(2)" in out
    assert "coordinator  file 127.0.0.1:free port" in out
    assert "machine" not in out
    assert doctor.run(["--launcher", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["world"]["launcher"], document["coordinator"]["kind"]) == ("openmpi", "file")


def test_without_a_launcher_flag_the_machine_is_shown_too(capsys):
    assert doctor.run(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    machine = document["machine"]
    assert machine["cores"] >= machine["threads_per_rank"] >= 1
    assert machine["torch"][0].isdigit()
    assert document["hardware"]["hosts"][0]["cores"] >= 1
    assert document["ready"] is True
    assert doctor.run([]) == 0
    assert re.search(r"\nhardware\n  \d+ ", capsys.readouterr().out)


def test_a_guess_of_hosts_is_said(capsys, monkeypatch):
    for name, value in MPI.items():
        monkeypatch.setenv(name, value.replace("2", "4") if name.endswith("WORLD_SIZE") else value)
    assert doctor.run(["--launcher"]) == 0
    out = capsys.readouterr().out
    assert "exchange their host names" in out
    assert "coordinator  mpi" in out


@pytest.mark.usefixtures("under_mpirun")
def test_a_contradiction_shows_every_family(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"(?s)contradict.*srun +not set"):
        doctor.run(["--launcher"])


def test_no_way_to_find_rank_0_shows_every_family(monkeypatch):
    hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in hand.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"(?s)MASTER_ADDR.*env +rank 1 of 2.*srun +not set"):
        doctor.run(["--launcher"])


def test_the_hardware_file_describes_this_machine_elsewhere(capsys, tmp_path):
    path = tmp_path / "here.yaml"
    assert doctor.run(["--hardware"]) == 0
    path.write_text(capsys.readouterr().out)
    here = load_hardware(str(path))
    there = detect_hardware(environ.snapshot())
    # Free memory changes between two looks.
    assert [device.name for device in here.devices] == [device.name for device in there.devices]
    assert here.hosts[0].cores == there.hosts[0].cores
    assert here.hosts[0].link == there.hosts[0].link


def test_findings_are_printed_with_their_cure_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert doctor.run([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "ib7" in line]
    assert line.startswith("  blocker  interface      GLOO_SOCKET_IFNAME names ib7")
    assert "; let GLOO_SOCKET_IFNAME name one of" in line
    assert lines[-1].startswith("verdict: not ready, 1 blocker,")
    assert not re.search(r"\bgib\b", "\n".join(lines), re.IGNORECASE)


@pytest.mark.usefixtures("under_mpirun")
def test_a_contradiction_is_a_blocker_among_the_findings(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doctor.run(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    first = document["findings"][0]
    assert document["ready"] is False
    assert (first["check"], first["level"]) == ("launcher", "blocker")
    assert "contradict" in first["said"]
    assert "unset the ones" in first["said"].lower()
    assert doctor.run([]) == 1
    assert "srun      not set" in capsys.readouterr().out


def test_a_slurm_shell_is_warned_among_the_findings(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert doctor.run([]) == 0
    assert "warning  launcher       this Slurm job has 8 tasks" in capsys.readouterr().out


# -- facts and what they mean ----------------------------------------------------------------------

CUDA = {"built_for": "CUDA 13.0", "gpus": 2, "gpus_here": 2, "backends": ["gloo", "nccl"]}
GOOD: dict[str, Any] = {
    **{"torch": "2.13.0", "torch_problem": "", "backends": ["gloo"], "visible": None},
    **{"gpus": 0, "gpus_here": 0, "gpu_problem": "", "built_for": ""},
    **{"interface": "eth0", "named_interface": "", "interfaces": ["lo", "eth0"]},
    **{"one_host": True, "token": False},
    **{"ranks_here": 2, "cores": 8, "load": 0.5},
    **{"alike": {"torch": "2.13.0", "python": "3.12.1"}},
}

TABLE = [
    ("torch", {"torch": "", "torch_problem": "No module"}, "blocker", "torch cannot be imported"),
    ("torch", {"torch_problem": "libfoo"}, "blocker", "2.13.0 cannot be imported: libfoo"),
    ("torch", {"backends": []}, "blocker", "no backend, without gloo"),
    ("torch", CUDA | {"backends": ["gloo"]}, "blocker", "with gloo, without nccl"),
    ("GPUs", {}, "ok", "none"),
    ("GPUs", CUDA, "ok", "2 of 2 usable, torch for CUDA 13.0"),
    ("GPUs", {"gpus_here": 4}, "warning", "4 here, but torch is built for the CPU"),
    ("GPUs", {"visible": "7"}, "warning", "names 1, usable: 0 of 0"),
    ("GPUs", CUDA | {"visible": "7", "gpus": 0}, "blocker", "names 1, usable: 0 of 2"),
    ("GPUs", CUDA | {"visible": "0,7", "gpus": 1}, "warning", "names 2, usable: 1 of 2"),
    ("GPUs", CUDA | {"visible": "", "gpus": 0}, "ok", "2 here, hidden"),
    ("GPUs", CUDA | {"visible": "-1", "gpus": 0}, "ok", "2 here, hidden"),
    ("GPUs", CUDA | {"gpus": 0, "gpu_problem": "driver too old"}, "blocker", "driver too old"),
    ("interface", {}, "ok", "eth0"),
    ("interface", {"named_interface": "lo"}, "ok", "lo"),
    ("interface", {"named_interface": "eth0,ib7"}, "blocker", "names ib7, which is not here"),
    ("interface", {"interface": ""}, "warning", "none leads to other hosts"),
    ("job token", {}, "ok", "made by the ranks of one host"),
    ("job token", {"one_host": False}, "warning", "none: whoever reaches the rendezvous can write"),
    ("job token", {"one_host": False, "token": True}, "ok", "given"),
    ("cores", {"cores": 1}, "warning", "1 for 2 ranks"),
    ("cores", {}, "ok", "8 for 2 ranks"),
    ("load", {"load": 7.0}, "warning", "load 7.0 on 8 cores"),
]


@pytest.mark.parametrize(("check", "changes", "level", "said"), TABLE)
def test_facts_are_judged(check, changes, level, said):
    findings = judge(GOOD | changes)
    (finding,) = [each for each in findings if each.check == check]
    assert (finding.level, said in finding.said) == (level, True), finding
    assert bool(finding.cure) == (level != "ok")
    assert not any("\n" in each.said + each.cure for each in findings)


def test_this_machine_gives_every_fact():
    facts = gather({"GLOO_SOCKET_IFNAME": "ib7"}, World(), "")
    assert facts.keys() == GOOD.keys()
    levels = {each.check: each.level for each in judge(facts)}
    assert (levels["interface"], levels["torch"]) == ("blocker", "ok")


# -- all ranks ------------------------------------------------------------------------------------


def told(number: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """As each of `number` good ranks tells; `changes` are the facts of rank 1."""
    rank = {"facts": GOOD, "sums": {"gloo": (True, 1e-4, 1e9)}}
    ranks = [dict(rank) for _ in range(number)]
    ranks[1]["facts"] = GOOD | changes
    return ranks


def found(ranks: list[dict[str, Any]], check: str) -> list[Finding]:
    return [each for each in judge_ranks(ranks) if each.check == check]


def test_good_ranks_have_nothing_to_cure():
    findings = judge_ranks(told())
    assert {each.level for each in findings} == {"ok"}
    assert len({each.check for each in findings}) == len(findings)
    assert found(told(), "ranks alike")[0].said == "3 ranks, the same torch, python"
    assert found(told(), "gloo sum")[0].said == "100 µs for 8 bytes, 1 GB/s for 16 MiB"


def test_ranks_that_differ_are_named():
    values = [{"torch": "2.13.0", "python": "3.12"}] * 4
    values[1] = {"torch": "2.11.0", "python": "3.12"}
    values[2] = {"torch": "2.11.0", "python": "3.11"}
    torch, python = judge_alike(values + values[:1] * 3)
    assert torch.said == "torch differs: ranks 1, 2 2.11.0, the others 2.13.0"
    assert torch.level == "blocker"
    assert (python.level, python.said) == (
        "warning",
        "python differs: rank 2 3.11, the others 3.12",
    )
    many = judge_alike([{"python": "3.11"}] * 10 + [{"python": "3.12"}] * 20)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more 3.11, the others 3.12" in many[0].said


def test_a_finding_of_some_ranks_names_them_and_one_of_all_does_not():
    (finding,) = found(told(cores=1), "cores")
    assert finding.said == "rank 1: 1 for 2 ranks"
    ranks = told()
    for rank in ranks:
        rank["facts"] = GOOD | {"cores": 1}
    (finding,) = found(ranks, "cores")
    assert finding.said.startswith("1 for 2 ranks")


@pytest.mark.parametrize(
    ("gloo", "level", "said"),
    [
        ((False, 1e-4, 1e9), "blocker", "a wrong sum; 100 µs"),
        ((True, 0.02, 1e9), "warning", "20,000 µs"),
        ((True, 1e-4, 4e7), "warning", "0.04 GB/s"),
    ],
)
def test_the_slowest_rank_counts(gloo, level, said):
    ranks = told()
    ranks[2]["sums"] = {"gloo": gloo}
    (finding,) = found(ranks, "gloo sum")
    assert (finding.level, said in finding.said) == (level, True), finding
