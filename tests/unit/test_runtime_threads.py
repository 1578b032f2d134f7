"""Intra-op threads: one rule, whatever the launcher left behind."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch

from gradsync.runtime import threads
from gradsync.runtime.threads import cgroup_cores, choose_threads, pin_threads


@pytest.mark.parametrize(
    ("ranks", "host", "allowed", "limit", "expected"),
    [
        (1, 8, 8, inf, 8),
        (2, 8, 8, inf, 4),
        (3, 8, 8, inf, 2),  # rounded down: three ranks use six of the eight
        (2, 8, 1, inf, 1),  # a launcher that binds has already divided
        (2, 8, 4, inf, 4),  # so the smaller one counts, not their quotient
        (16, 8, 8, inf, 1),  # more ranks than cores
        (2, 64, 64, 4.0, 2),  # a container's share counts as the host's cores
        (1, 64, 64, 2.5, 2),
        (1, 64, 64, 0.5, 1),  # a share below one core
        (1, 2, 2, 16.0, 2),  # a limit above what there is
    ],
)
def test_cores_of_the_host_over_its_ranks(
    ranks: int, host: int, allowed: int, limit: float, expected: int
) -> None:
    chosen = choose_threads(ranks, host_cores=host, allowed_cores=allowed, limit=limit)
    assert chosen == expected


def test_the_users_number_wins() -> None:
    assert choose_threads(4, requested=3, host_cores=64, allowed_cores=1, limit=1.0) == 3


def test_what_is_not_told_is_read_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 12)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(threads, "cgroup_cores", lambda: None)
    assert choose_threads(2) == 6
    monkeypatch.setattr(threads, "cgroup_cores", lambda: 4.0)
    assert choose_threads(2) == 2
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {7}, raising=False)
    assert choose_threads(2) == 1
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)  # the system does not tell
    assert choose_threads(1) == 1


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2.0),
        ("150000 100000\n", 1.5),
        ("", None),
        ("what\n", None),
        ("a b\n", None),
    ],
)
def test_the_containers_limit(text: str, cores: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_cores(tmp_path) == cores


def test_no_container(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path / "nowhere") is None


def test_pinning_tells_what_there_was() -> None:
    before = torch.get_num_threads()
    try:
        assert pin_threads(before + 2) == before
        assert torch.get_num_threads() == before + 2
    finally:
        assert pin_threads(before) == before + 2
    assert torch.get_num_threads() == before
