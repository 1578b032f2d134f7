"""Loaders deal among the ranks that there are now: after a loss no sample is missing or twice."""

from __future__ import annotations

import pytest

from gradsync.data.loader import EvalLoader, Loader
from gradsync.data.micro_batch import Batch
from gradsync.world import World

SAMPLES = list(range(24))


def ranks(count: int) -> list[World]:
    alike = {"world_size": count, "local_world_size": count}
    return [World(rank=rank, local_rank=rank, **alike) for rank in range(count)]


def lose_the_last(worlds: list[World]) -> list[World]:
    left = worlds[:-1]
    for world, fewer in zip(left, ranks(len(left)), strict=True):
        world.become(fewer)
    return left


def samples_of(batches: list[Batch]) -> list[int]:
    micro_batches = [each for batch in batches for each in batch]
    assert {each.world_size for each in micro_batches} == {len(batches)}
    return [sample for each in micro_batches for sample in each.batch.tolist()]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("repeats", [True, False])
def test_no_sample_is_missing_and_none_comes_twice(repeats: bool, num_workers: int) -> None:
    worlds = ranks(3)
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "num_epochs": 1, "shuffle": False}
    loaders = [Loader(SAMPLES, world, num_workers=num_workers, **sizes) for world in worlds]
    loops = [iter(loader) for loader in loaders]
    assert samples_of([next(loop) for loop in loops]) == SAMPLES[:8]
    second = [next(loop) for loop in loops]
    if repeats:
        next(iter(second[0]))  # it has begun
    else:
        assert samples_of(second) == SAMPLES[8:16]
    loaders[-1].close()
    lose_the_last(worlds)
    loops = loops[:-1]
    if repeats:
        for batch in second[:-1]:
            batch.deal_again()
        assert samples_of(second[:-1]) == SAMPLES[8:16]
    assert samples_of([next(loop) for loop in loops]) == SAMPLES[16:]
    assert [list(loop) for loop in loops] == [[], []]
    assert [loader.plan.world_size for loader in loaders[:-1]] == [2, 2]


def test_an_evaluation_covers_the_lost_ranks_share() -> None:
    worlds = ranks(3)
    loaders = [EvalLoader(SAMPLES, world, 2) for world in worlds]
    left = loaders[: len(lose_the_last(worlds))]
    found = [sample for loader in left for each in loader for sample in each.batch.tolist()]
    assert found == SAMPLES
    assert [len(loader) for loader in left] == [6, 6]
    assert left[0].most == 6
