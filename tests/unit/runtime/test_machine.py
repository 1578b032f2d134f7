"""Threads by one rule, whatever the launcher left behind; memory within limits of containers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from gradsync.runtime import machine
from gradsync.runtime.machine import (
    available_bytes,
    cgroup_cores,
    choose_threads,
    pin_threads,
    total_bytes,
)


@pytest.mark.parametrize(
    ("ranks", "host", "allowed", "limit", "expected"),
    [
        (1, 8, 8, None, 8),
        (2, 8, 8, None, 4),
        (3, 8, 8, None, 2),  # rounded down: three ranks use six of the eight
        (2, 8, 1, None, 1),  # a launcher that binds has already divided
        (2, 8, 4, None, 4),  # so the smaller one counts, not their quotient
        (16, 8, 8, None, 1),  # more ranks than cores
        (2, 64, 64, 4.0, 2),  # a container's share counts as the host's cores
        (1, 64, 64, 2.5, 2),
        (1, 64, 64, 0.5, 1),  # a share below one core
        (1, 2, 2, 16.0, 2),  # a limit above what there is
    ],
)
def test_cores_of_the_host_over_its_ranks(
    ranks: int,
    host: int,
    allowed: int,
    limit: float | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: host)
    affinity = set(range(allowed))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: affinity, raising=False)
    monkeypatch.setattr(machine, "cgroup_cores", lambda _: limit)
    assert choose_threads(ranks) == expected
    assert choose_threads(ranks, requested=3) == 3


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("200000 100000\n", 2.0), ("150000 100000\n", 1.5), ("", None)],
)
def test_the_containers_limit(text: str, cores: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_cores(tmp_path) == cores


def test_pinning_tells_what_there_was() -> None:
    before = torch.get_num_threads()
    try:
        assert pin_threads(before + 2) == before
        assert torch.get_num_threads() == before + 2
    finally:
        assert pin_threads(before) == before + 2
    assert torch.get_num_threads() == before


# -- memory, as folders of control groups say it --------------------------------------------------

MIB = 2**20
UNLIMITED = "9223372036854771712"
"""As version 1 says it."""


def version_2(folder: Path, limit: str, used: int = 10 * MIB) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\nactive_file {2 * MIB}\n")


def version_1(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{10 * MIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {MIB}\n")


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_a_containers_limit(tmp_path: Path) -> None:
    version_2(tmp_path, str(100 * MIB))
    nowhere = tmp_path / "none"
    assert total_bytes(tmp_path, nowhere) == 100 * MIB
    assert available_bytes(tmp_path, nowhere) == 93 * MIB
    version_2(tmp_path, str(100 * MIB), used=200 * MIB)
    assert available_bytes(tmp_path, nowhere) == 0


@pytest.mark.parametrize("inner", ["max", str(90 * MIB), str(300 * MIB)])
def test_a_jobs_limit_below_the_hosts_tree(tmp_path: Path, inner: str) -> None:
    version_2(tmp_path / "slurm", "max")
    version_2(tmp_path / "slurm/job_5", str(100 * MIB))
    version_2(tmp_path / "slurm/job_5/step_0", inner)
    member = own(tmp_path, "0::/slurm/job_5/step_0\n")
    expected = 90 if inner == str(90 * MIB) else 100
    assert total_bytes(tmp_path, member) == expected * MIB
    assert available_bytes(tmp_path, member) == (expected - 7) * MIB
    assert total_bytes(tmp_path, own(tmp_path, "0::/other\n")) == psutil.virtual_memory().total


def test_version_1_has_a_folder_of_its_own(tmp_path: Path) -> None:
    version_1(tmp_path / "memory", UNLIMITED)
    version_1(tmp_path / "memory/slurm", str(50 * MIB))
    version_1(tmp_path / "cpu/slurm", str(MIB))
    member = own(tmp_path, "4:memory:/slurm\n1:cpu:/slurm\n0::/\n")
    assert total_bytes(tmp_path, member) == 50 * MIB
    assert available_bytes(tmp_path, member) == 41 * MIB
    version_1(tmp_path / "container/memory", str(60 * MIB))
    assert total_bytes(tmp_path / "container", tmp_path / "none") == 60 * MIB


@pytest.mark.parametrize("text", ["", "0::/../outside\n", "nonsense", "0::/none"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, text: str) -> None:
    version_2(tmp_path / "outside", str(MIB))
    root = tmp_path / "root"
    version_1(root / "memory", UNLIMITED)
    assert total_bytes(root, own(tmp_path, text)) == psutil.virtual_memory().total
