"""A rank that the others wait for is named; even ranks, noise and pauses are passed over."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.watch import Stopwatch, StragglerWatch, find_straggler
from support.thread_ranks import run_thread_ranks


def steps(own: Tensor, leaves: Tensor | None = None) -> Tensor:
    """Ten steps of ranks that take so long by themselves, and wait for the last one, [W, 10, 3]."""
    wall = own.max(0).values.expand_as(own) + 0.01
    leaves = torch.ones_like(own) if leaves is None else leaves[:, None].expand_as(own)
    return torch.stack([wall, wall - own, leaves], dim=2)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(0.1).exp()


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_named_within_ten_steps(world_size: int, slow: int) -> None:
    for seed in range(50):
        compute = noise(world_size, 10, seed=seed)
        compute[slow] *= 1.8
        rank, said = find_straggler(steps(compute))
        assert rank == slow
        assert said.startswith(f"rank {slow} is slow: the others wait for it")


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_even_ranks_are_not_reported(world_size: int) -> None:
    for seed in range(100):
        compute = noise(world_size, 10, seed=seed)
        assert find_straggler(steps(compute)) == (-1, "")


@pytest.mark.parametrize(("lag_s", "slow"), [(0.0008, -1), (0.0012, 1)])
def test_less_than_a_millisecond_is_not_worth_a_warning(lag_s: float, slow: int) -> None:
    wall, waits = torch.full((2, 10), 0.003), torch.zeros(2, 10)
    waits[0] = lag_s
    columns = [wall, waits, torch.ones(2, 10)]
    assert find_straggler(torch.stack(columns, 2))[0] == slow


@pytest.mark.parametrize(
    ("leaves", "pace", "said"),
    [
        (
            [1.0, 2.0],
            [1.0, 1.0],
            "rank 1 has 2 of a step's 3 micro-batches: the others wait for it",
        ),
        ([0.0, 1.0], [1.0, 1.0], "rank 1 has 1 of a step's 1 micro-batches"),
        ([1.0, 1.0, 2.0], [1.0, 1.1, 1.0], "rank 2 has 2 of a step's 4 micro-batches"),
        ([1.0, 2.0], [1.0, 2.0], "rank 1 is slow"),  # at each of them
        ([2.0, 1.0], [1.0, 3.0], "rank 1 is slow"),  # although it has fewer
        ([2.0, 2.0], [1.0, 2.0], "rank 1 is slow"),
    ],
)
def test_a_rank_that_was_dealt_more_is_not_called_slow(
    leaves: list[float], pace: list[float], said: str
) -> None:
    for seed in range(20):
        dealt = torch.tensor(leaves)
        compute = (dealt * torch.tensor(pace))[:, None] * noise(len(leaves), 10, seed=seed) / 5
        found = find_straggler(steps(compute, dealt))[1]
        assert found.startswith(said)


def test_pauses_of_one_rank_are_no_slowness() -> None:
    """It saves in every fifth step."""
    compute = noise(2, 10, seed=1) * 0.01 + 0.1
    compute[0, ::5] += 3.0
    assert find_straggler(steps(compute)) == (-1, "")


class Waited:
    """A stopwatch that has been read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = lambda: seconds


def test_it_is_said_once_by_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, group: object) -> None:
        watch = StragglerWatch(ProcessGroupCommunicator(group))
        for slow in [1] * 34 + [-1] * 11 + [0] * 11:  # more than one window each
            watch.step_ends(Waited(0.0 if rank == slow or slow < 0 else 100.0), 0.0)  # type: ignore

    run_thread_ranks(work, 3)
    said = [record.message for record in caplog.records if "is slow" in record.message]
    assert [line[:6] for line in said] == ["rank 1", "rank 0"]


def test_a_copy_keeps_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch(on_cuda=False)
    readings = []
    for _ in range(2):
        watch.start()
        watch.stop()
        readings.append(copy.copy(watch))
    assert [reading.seconds() for reading in readings] == [2.5, 0.25]


def test_nothing_measured_is_zero() -> None:
    watch = Stopwatch(on_cuda=False)
    assert watch.seconds() == 0.0
    watch.stop()
    assert watch.seconds() == 0.0
