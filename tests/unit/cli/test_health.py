"""Facts about a machine and what they mean for a run, by table; nothing of this machine counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gradsync.commands.cli import health
from gradsync.commands.cli.health import (
    Finding,
    from_message,
    judge,
    judge_alike,
    judge_disk,
    judge_ranks,
)
from gradsync.world import World

MIB, GIB = 2**20, 2**30
CUDA = {"built_for": "CUDA 13.0", "gpus": 2, "gpus_here": 2, "backends": ["gloo", "nccl"]}
GOOD: dict[str, Any] = {
    **{"torch": "2.13.0", "torch_problem": "", "backends": ["gloo"], "visible": None},
    **{"gpus": 0, "gpus_here": 0, "gpu_problem": "", "built_for": ""},
    **{"host": "node-a", "address": "192.0.2.5", "own_address": "192.0.2.5"},
    **{"interface": "eth0", "named_interface": "", "interfaces": ["lo", "eth0"]},
    **{"one_host": True, "token": False},
    **{"port": 0, "port_problem": "", "ranks": 2, "ranks_here": 2, "files": [1024, 4096]},
    **{"cores": 8, "cores_machine": 8},
    **{"free": 8 * GIB, "memory": 16 * GIB, "memory_machine": 16 * GIB, "shm": 2 * GIB},
    **{"mpi": None, "alike": {"torch": "2.13.0", "python": "3.12.1", "open files": 1024}},
}
DISK = {"folder": "/d", "asked": False, "problem": "", "free": 9 * GIB, "fsync_s": 0.02}

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
    ("host name", {}, "ok", "node-a is 192.0.2.5"),
    ("host name", {"address": ""}, "warning", "node-a does not resolve"),
    ("interface", {}, "ok", "eth0"),
    ("interface", {"named_interface": "lo"}, "ok", "lo"),
    ("interface", {"named_interface": "eth0,ib7"}, "blocker", "names ib7, which is not here"),
    ("interface", {"interface": ""}, "warning", "none leads to other hosts"),
    ("port", {}, "ok", "a free one can be bound"),
    ("port", {"port": 29500}, "ok", "29500 can be bound"),
    ("port", {"port": 29500, "port_problem": "in use"}, "blocker", "29500 cannot be bound: in use"),
    ("job token", {}, "ok", "made by the ranks of one host"),
    ("job token", {"one_host": False}, "warning", "none: whoever reaches the rendezvous can write"),
    ("job token", {"one_host": False, "token": True}, "ok", "given"),
    ("open files", {"files": [math.inf, math.inf]}, "ok", "unlimited"),
    ("open files", {"files": [1023, 4096]}, "warning", "1,023 of at most 4,096"),
    ("open files", {"files": [35, 4096]}, "blocker", "some 36 for 2 ranks"),
    ("open files", {"files": [36, 4096]}, "warning", "36 of"),
    ("open files", {"ranks": 1000}, "blocker", "some 2032 for 1,000 ranks"),
    (
        "cores",
        {"cores": 1, "cores_machine": 64},
        "warning",
        "container's limit; the machine has 64",
    ),
    ("cores", {"cores": 2, "cores_machine": 64}, "ok", "2 for 2 ranks, this container's limit"),
    ("memory", {"free": 2 * GIB - 1}, "warning", "2.1 GB free of 17.2 GB"),
    (
        "memory",
        {"free": 2 * GIB, "memory": 4 * GIB},
        "ok",
        "container's limit; the machine has 17",
    ),
    ("shared memory", {"shm": GIB - 1}, "warning", "little for NCCL"),
    ("shared memory", {"shm": 0}, "warning", "/dev/shm holds 0.0 MB"),
    ("shared memory", CUDA | {"shm": 64 * MIB - 1}, "blocker", "little for NCCL"),
    ("shared memory", CUDA | {"shm": 64 * MIB}, "warning", "little for NCCL"),
    (
        "MPI",
        {"mpi": ["mpirun (Open MPI) 4.1.4", "Open MPI v4.1.4", ""]},
        "ok",
        "loads Open",
    ),
    ("MPI", {"mpi": ["hydra", "Intel(R) MPI Library 2021.5", ""]}, "ok", "mpirun is MPICH"),
    (
        "MPI",
        {"mpi": ["openmpi", "MPICH Version: 4.0.2", ""]},
        "warning",
        "mpi4py loads MPICH",
    ),
    ("MPI", {"mpi": ["openmpi", "", "no libmpi.so"]}, "warning", "no library (no libmpi.so)"),
]


@pytest.mark.parametrize(("check", "changes", "level", "said"), TABLE)
def test_facts_are_judged(check, changes, level, said):
    findings = judge(GOOD | changes)
    (finding,) = [each for each in findings if each.check == check]
    assert (finding.level, said in finding.said) == (level, True), finding
    assert bool(finding.cure) == (level != "ok")
    assert not any("\n" in each.said + each.cure for each in findings)


def test_a_good_machine_has_nothing_to_cure():
    assert {each.level for each in judge(GOOD)} == {"ok"}


def test_the_cure_of_few_open_files_is_what_can_be_set():
    def cure(hard: float) -> str:
        findings = judge(GOOD | {"files": [64, hard]})
        return next(each.cure for each in findings if each.check == "open files")

    assert cure(4096).startswith("`ulimit -n 4096`")
    assert cure(math.inf).startswith("`ulimit -n 65536`")
    assert "limits.conf" in cure(64)


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({}, "ok", "/d has 9.7 GB free; 4 MiB are on disk in 0.02 s"),
        ({"fsync_s": 1.5}, "warning", "in 1.5 s"),
        ({"free": GIB - 1}, "warning", "free"),
        ({"free": 63 * MIB}, "blocker", "free"),
        ({"problem": "Read-only file system"}, "warning", "/d cannot be written: Read-only"),
        ({"problem": "Read-only file system", "asked": True}, "blocker", "cannot be written"),
    ],
)
def test_a_disk_is_judged(changes, level, said):
    finding = judge_disk(DISK | changes)
    assert (finding.level, said in finding.said) == (level, True), finding


def test_the_disk_is_tried_where_the_folder_will_be(tmp_path):
    facts = health.gather_disk(str(tmp_path / "runs" / "first"))
    assert (facts["folder"], facts["asked"], facts["problem"]) == (str(tmp_path), True, "")
    assert facts["free"] > 0
    assert facts["fsync_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert health.gather_disk("/proc/nowhere")["problem"]


def test_messages_are_cut_into_what_was_seen_and_the_cure():
    taken = from_message("ranks", "blocker", "port 5 is in use; set MASTER_PORT\nmore")
    assert taken == Finding("ranks", "blocker", "port 5 is in use", "set MASTER_PORT")
    odd = "variables contradict. Unset those. What each launcher family says:\n  env"
    assert from_message("launcher", "blocker", odd).cure == "unset those"
    assert from_message("ranks", "blocker", "no cure").cure == ""


def test_this_machine_gives_every_fact(monkeypatch):
    def unknown(_):
        raise OSError("unknown")

    monkeypatch.setattr(health.socket, "gethostbyname", unknown)
    facts = health.gather({"GLOO_SOCKET_IFNAME": "ib7"}, World(), "")
    assert facts.keys() == GOOD.keys()
    levels = {each.check: each.level for each in judge(facts)}
    assert (levels["host name"], levels["interface"]) == ("warning", "blocker")
    assert levels["torch"] == "ok"


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
    assert found(told(), "ranks alike")[0].said == "3 ranks, the same torch, python, open files"
    assert found(told(), "gloo sum")[0].said == "100 µs for 8 bytes, 1 GB/s for 16 MiB"


def test_ranks_that_differ_are_named():
    values = [{"torch": "2.13.0", "open files": 64}] * 4
    values[1] = {"torch": "2.11.0", "open files": 64}
    (finding,) = judge_alike(values)
    assert finding.said == "torch differs: rank 1 2.11.0, the others 2.13.0"
    assert finding.level == "blocker"
    values[2] = {"torch": "2.11.0", "open files": 1024}
    torch, files = judge_alike([*values, *values[:1] * 3])
    assert torch.said == "torch differs: ranks 1, 2 2.11.0, the others 2.13.0"
    assert (files.level, files.said) == (
        "warning",
        "open files differs: rank 2 1024, the others 64",
    )
    many = judge_alike([{"python": "3.11"}] * 10 + [{"python": "3.12"}] * 20)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more 3.11, the others 3.12" in many[0].said


def test_a_finding_of_some_ranks_names_them_and_one_of_all_does_not():
    (finding,) = found(told(cores=1), "cores")
    assert finding.said == "rank 1: 1 for 2 ranks, this container's limit; the machine has 8"
    ranks = told()
    for rank in ranks:
        rank["facts"] = GOOD | {"cores": 1}
    (finding,) = found(ranks, "cores")
    assert finding.said.startswith("1 for 2 ranks")
    port = found(told(port=5, port_problem="in use"), "port")
    assert [(each.level, each.said) for each in port] == [
        ("blocker", "rank 1: 5 cannot be bound: in use")
    ]


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


def test_a_finding_that_is_ok_needs_no_cure():
    assert health.grade("x", "fine", "cure") == Finding("x", "ok", "fine")
    grave = health.grade("x", "bad", "cure", blocker=True, warning=True)
    assert grave == replace(grave, level="blocker", cure="cure")
