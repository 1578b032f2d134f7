"""Limits of containers and jobs, as folders of control groups say them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gradsync.runtime.memory_limit import available_bytes, total_bytes

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
