"""Ranks agree on a micro-batch, also when one of them runs out of memory and the others do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradsync.commands.train.micro_batch import (
    Cost,
    MemoryProbe,
    Rehearsal,
    Trial,
    chosen_size,
    find_micro_batch,
    is_out_of_memory,
    try_sizes,
)
from torch import nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.world import World
from support.small_run import small_config
from support.thread_ranks import run_thread_ranks

SIZES = (1, 2, 4, 8, 16, 32)
LIMIT = 1000


def cost_of(size: int, *, per_sequence: int = 10) -> Cost:
    return Cost(peak_bytes=100 + per_sequence * size, held_bytes=100, seconds=1.0)


def tried_by(
    rank: int, group: dist.ProcessGroup, *, fails: tuple[int, int], careful: bool = False
) -> tuple[tuple[Trial, ...], list[int]]:
    """`fails`: (rank, round) at which torch runs out of memory, once."""
    seen: list[int] = []

    def out_of_memory(_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    def attempt(size: int) -> Cost | None:
        seen.append(size)
        if (rank, len(seen) - 1) == fails:
            return MemoryProbe("cpu").run(out_of_memory)
        return cost_of(size)

    comm = ProcessGroupCommunicator(group)
    trials = try_sizes(comm, attempt, SIZES, limit_bytes=LIMIT, careful=careful)
    return trials, seen


@pytest.mark.parametrize("fails", [(0, 0), (1, 0), (1, 3), (2, 5), (0, 99)])
def test_memory_that_runs_out_on_one_rank_keeps_nobody_waiting(fails: tuple[int, int]) -> None:
    results = run_thread_ranks(lambda rank, group: tried_by(rank, group, fails=fails), 3)
    trials = results[0][0]
    assert all(other == trials for other, _ in results)
    assert all(seen == [trial.size for trial in trials] for _, seen in results)
    expected = {0: None, 3: 4, 5: 16, 99: 32}[fails[1]]
    assert chosen_size(trials, careful=False) == expected
    if expected is not None:
        assert all(trial.fits == (round_ != fails[1]) for round_, trial in enumerate(trials))


def test_the_smallest_device_decides() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[Trial, ...]:
        comm = ProcessGroupCommunicator(group)
        limit = (LIMIT, 200)[rank]  # 100 are held
        return try_sizes(comm, cost_of, SIZES, limit_bytes=limit, careful=False)

    first, second = run_thread_ranks(work, 2)
    assert first == second
    assert [trial.size for trial in first] == [1, 2, 4, 8, 16]
    assert chosen_size(first, careful=False) == 8
    assert first[0].peak == pytest.approx(110 / 200)


def test_what_a_sequence_adds_is_told_by_the_last_two_sizes_and_the_limit_counts() -> None:
    def tried(limit_bytes: int, attempt: Any = cost_of, *, careful: bool = False) -> Any:
        comm = SingleCommunicator()
        return try_sizes(comm, attempt, SIZES, limit_bytes=limit_bytes, careful=careful)

    def steeper(size: int) -> Cost:
        return Cost(peak_bytes=100 + size * size, held_bytes=100, seconds=1.0)

    trials = tried(LIMIT, steeper)
    assert trials[0].slope == pytest.approx(1 / LIMIT)  # what is held does not grow
    assert trials[2].slope == pytest.approx((16 - 4) / 2 / LIMIT)
    careful = [(trial.size, trial.fits) for trial in tried(259, careful=True)]
    assert careful == [(size, True) for size in (1, 2, 4, 8)]  # stops before the limit
    ran = [(trial.size, trial.fits) for trial in tried(139)]
    assert ran == [(1, True), (2, True), (4, False)]  # ran, but took too much


def test_memory_runs_out_in_several_words_and_other_errors_are_not_taken_for_it() -> None:
    cpu = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you"
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"
    for error in (MemoryError(), RuntimeError(cpu), RuntimeError(cublas)):
        assert is_out_of_memory(error)

    def broken(_: object) -> float:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        MemoryProbe("cpu").run(broken)


def test_a_real_peak_is_seen() -> None:
    """96 MiB for a moment, 32 of them held: both are told, and nothing stays."""
    probe = MemoryProbe("cpu")
    mib = 2**20

    def work(mark: object) -> float:
        held = torch.ones(32 * mib, dtype=torch.uint8)
        more = torch.ones(64 * mib, dtype=torch.uint8)
        del more
        mark()
        return float(held[0])

    cost = probe.run(work)
    assert cost is not None
    assert 90 * mib < cost.peak_bytes < 120 * mib
    assert 30 * mib < cost.held_bytes < 50 * mib


def test_the_whole_search_with_one_rank_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model on two ranks; rank 1 cannot take two sequences, though its memory could."""
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    config = replace(small_config(tmp_path, tmp_path), tokens_per_update=128)
    original = Rehearsal._leaf

    def leaf(self: Rehearsal, model: nn.Module, size: int) -> None:
        if (self._world.rank, size) == (1, 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(self, model, size)

    monkeypatch.setattr(Rehearsal, "_leaf", leaf)

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, str]:
        world = World(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        comm = ProcessGroupCommunicator(group)
        return find_micro_batch(config, config.model, world, comm, threads=1)

    first, second = run_thread_ranks(work, 2)
    assert (first[0], second[0]) == (1, 1)
    assert "tried 1, 2; 2 does not fit" in first[1]
