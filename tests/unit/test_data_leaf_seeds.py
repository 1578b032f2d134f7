"""What is drawn at random at a leaf depends on (seed, step, leaf), not on who has the leaf."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from gradsync.comm.groups import SingleCommunicator
from gradsync.data.loader import loader
from gradsync.data.streaming import StreamLoader, stream_loader
from gradsync.runtime.seeds import seed_leaf
from gradsync.world import World

Drawn = dict[tuple[int, int], list[float]]
"""By (step, leaf): the next random numbers when the leaf was handed out."""

OPTIONS: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 2}


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


class Noisy:
    """Samples are drawn anew whenever they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


def draw(steps: Any, num_steps: int = 3) -> Drawn:
    """Numbers drawn at each leaf, as dropout would, with other draws in between."""
    drawn = {}
    for step in islice(steps, num_steps):
        for leaf in step:
            drawn[leaf.step, leaf.index] = torch.rand(3).tolist()
            torch.rand(leaf.index)
        torch.rand(5)
    return drawn


def over_ranks(world_size: int, **options: Any) -> Drawn:
    """Draws of all ranks, one rank after the other, each from another state."""
    drawn: Drawn = {}
    for rank in range(world_size):
        torch.manual_seed(rank)
        world = World(rank=rank, world_size=world_size)
        drawn |= draw(loader(range(12), world, **OPTIONS, **options))
    return drawn


def keyed(seed: int, keys: Any) -> Drawn:
    drawn = {}
    for step, leaf in keys:
        seed_leaf(seed, step, leaf)
        drawn[step, leaf] = torch.rand(3).tolist()
    return drawn


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_draws_are_keyed_by_seed_step_and_leaf(world_size: int, num_workers: int) -> None:
    drawn = over_ranks(world_size, seed=5, num_workers=num_workers)
    assert sorted(drawn) == [(step, leaf) for step in range(3) for leaf in range(6)]
    assert drawn == keyed(5, drawn)


def test_all_draws_are_different() -> None:
    drawn = [*over_ranks(2, seed=5).values(), *over_ranks(2, seed=6).values()]
    assert len({tuple(numbers) for numbers in drawn}) == 36


def test_a_resumed_loader_draws_what_the_undisturbed_one_did() -> None:
    one = loader(range(12), World(), **OPTIONS, seed=5)
    draw(one, 2)
    other = loader(range(12), World(), **OPTIONS, seed=5)
    other.load_state_dict(one.state_dict())
    assert draw(other, 1) == keyed(5, [(2, leaf) for leaf in range(6)])


def test_what_a_data_set_draws_is_keyed_too() -> None:
    def read(world_size: int) -> dict[tuple[int, int], list[float]]:
        found = {}
        for rank in range(world_size):
            torch.manual_seed(rank)
            world = World(rank=rank, world_size=world_size)
            for step in islice(loader(Noisy(), world, **OPTIONS), 2):
                for leaf in step:
                    found[leaf.step, leaf.index] = leaf.batch.tolist()
        return found

    assert read(1) == read(2) == read(3)


def test_generators_are_left_alone_on_request() -> None:
    torch.manual_seed(3)
    drawn = draw(loader(range(12), World(), **OPTIONS, seed_leaves=False), 1)
    torch.manual_seed(3)
    for leaf in range(6):
        assert drawn[0, leaf] == torch.rand(3).tolist()
        torch.rand(leaf)


# -- streams --------------------------------------------------------------------------------------


def stream(rank: int, **options: Any) -> StreamLoader:
    """Rank `rank` of two, which agrees with itself alone."""
    return stream_loader(
        range(12),
        World(rank=rank, world_size=2),
        global_batch_size=8,
        micro_batch_size=2,
        comm=SingleCommunicator(),
        num_epochs=2,
        collate_fn=torch.tensor,
        **options,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_keys_its_leaves_too(rank: int) -> None:
    torch.manual_seed(rank)
    drawn = draw(stream(rank, seed=5, seed_leaves=True))
    assert sorted(drawn) == [(step, 2 * rank + leaf) for step in range(3) for leaf in range(2)]
    assert drawn == keyed(5, drawn)


def test_a_stream_leaves_generators_alone_on_request() -> None:
    torch.manual_seed(3)
    drawn = draw(stream(0, seed=5, seed_leaves=False), 1)
    torch.manual_seed(3)
    assert drawn[0, 0] == torch.rand(3).tolist()
