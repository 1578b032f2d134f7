"""The loader's promise: order and exactness depend neither on the world size nor on workers."""

import json
import multiprocessing
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.data.leaf import Leaf
from gradsync.data.loader import Loader, loader
from gradsync.errors import ConfigError, DataError
from gradsync.world import World


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


def make(size: int, rank: int = 0, world_size: int = 1, **options: Any) -> Loader:
    return loader(Numbers(size), World(rank=rank, world_size=world_size), **options)


def read(one: Loader, num_steps: int) -> list[list[Leaf]]:
    """This rank's leaves of the next steps, at most `num_steps`."""
    steps = []
    for step in one:
        steps.append(list(step))
        assert len(step) == len(steps[-1])
        if len(steps) == num_steps:
            break
    return steps


def numbers(leaves: list[Leaf]) -> list[int]:
    return [number for leaf in leaves for number in leaf.batch.tolist()]


def together(loaders: list[Loader], num_steps: int) -> list[list[Leaf]]:
    """The leaves of all ranks, step by step in rank order."""
    per_rank = [read(one, num_steps) for one in loaders]
    return [[leaf for leaves in step for leaf in leaves] for step in zip(*per_rank, strict=True)]


@dataclass
class Case:
    size: int
    micro: int
    leaves: int
    worlds: tuple[int, int]
    epochs: int
    stop: int
    shuffle: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "global_batch_size": self.micro * self.leaves,
            "micro_batch_size": self.micro,
            "num_epochs": self.epochs,
            "shuffle": self.shuffle,
            "seed": 11,
        }

    def ranks(self, world_size: int) -> list[Loader]:
        return [make(self.size, rank, world_size, **self.options) for rank in range(world_size)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    leaves = draw(st.integers(1, 9))
    return Case(
        size=draw(st.integers(1, 50)),
        micro=draw(st.integers(1, 5)),
        leaves=leaves,
        worlds=(draw(st.integers(1, leaves)), draw(st.integers(1, leaves))),
        epochs=draw(st.integers(1, 3)),
        stop=draw(st.integers(0, 12)),
        shuffle=draw(st.booleans()),
    )


@given(case=cases())
def test_all_ranks_together_read_exactly_the_global_batches_in_order(case: Case) -> None:
    one = together(case.ranks(1), 10**6)
    many = together(case.ranks(case.worlds[0]), 10**6)
    assert [numbers(step) for step in many] == [numbers(step) for step in one]
    for number, step in enumerate(many):
        assert [leaf.index for leaf in step] == list(range(len(step)))
        assert {leaf.step for leaf in step} <= {number}
        assert all(leaf.num_samples == leaf.num_targets == len(leaf.batch) for leaf in step)
    sizes = [len(numbers(step)) for step in one]
    assert all(size == case.micro * case.leaves for size in sizes[:-1])
    assert sum(sizes) == case.size * case.epochs


@given(case=cases())
def test_each_sample_comes_once_an_epoch_wherever_batches_end(case: Case) -> None:
    stream = [n for step in together(case.ranks(case.worlds[0]), 10**6) for n in numbers(step)]
    for epoch in range(case.epochs):
        part = stream[epoch * case.size : (epoch + 1) * case.size]
        assert sorted(part) == list(range(case.size))


@given(case=cases())
def test_a_resumed_run_goes_on_alike_at_another_world_size(case: Case) -> None:
    undisturbed = together(case.ranks(1), 10**6)
    before = case.ranks(case.worlds[0])
    first = together(before, case.stop) if case.stop else []
    states = [json.loads(json.dumps(one.state_dict())) for one in before]
    assert all(state == states[0] for state in states)
    after = case.ranks(case.worlds[1])
    for one in after:
        one.load_state_dict(states[0])
    resumed = first + together(after, 10**6)
    assert [numbers(step) for step in resumed] == [numbers(step) for step in undisturbed]
    places = [[(leaf.step, leaf.index) for leaf in step] for step in resumed]
    assert places == [[(leaf.step, leaf.index) for leaf in step] for step in undisturbed]


@given(case=cases())
def test_all_ranks_agree_on_whether_to_synchronise(case: Case) -> None:
    world_size = case.worlds[0]
    per_rank = [read(one, 10**6) for one in case.ranks(world_size)]
    for step in zip(*per_rank, strict=True):
        everyone = all(step)
        for leaves in step:
            assert [leaf.is_last for leaf in leaves] == [
                everyone and place == len(leaves) - 1 for place in range(len(leaves))
            ]


def test_the_stream_has_no_end_by_default_and_epochs_advance_alone() -> None:
    one = make(10, global_batch_size=4, micro_batch_size=2)
    stream = [n for step in read(one, 25) for n in numbers(step)]
    assert Counter(stream) == dict.fromkeys(range(10), 10)
    assert one.epoch == 10.0
    assert stream[:10] != stream[10:20]


def test_leaving_the_loop_and_coming_back_goes_on_with_the_next_step() -> None:
    options = {"global_batch_size": 4, "micro_batch_size": 2}
    whole = read(make(10, **options), 4)
    one = make(10, **options)
    parts = read(one, 1) + read(one, 2) + read(one, 1)
    assert list(map(numbers, parts)) == list(map(numbers, whole))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaves_that_nobody_read_do_not_shift_the_following_steps(num_workers: int) -> None:
    options = {"global_batch_size": 6, "micro_batch_size": 2, "num_workers": num_workers}
    whole = read(make(24, **options), 4)
    one = make(24, **options)
    steps = iter(one)
    next(steps)
    leaf = next(iter(next(steps)))
    assert leaf.batch.tolist() == whole[1][0].batch.tolist()
    assert numbers(list(next(steps))) == numbers(whole[2])
    one.close()


def test_a_step_is_read_once_and_not_after_the_next_began() -> None:
    steps = iter(make(9, global_batch_size=2, micro_batch_size=1))
    first = next(steps)
    list(first)
    with pytest.raises(RuntimeError, match="leaves of step 0 can be read once"):
        list(first)
    second = next(steps)
    next(steps)
    with pytest.raises(RuntimeError, match="leaves of step 1 can be read once"):
        list(second)


def test_an_iteration_that_was_overtaken_says_so() -> None:
    one = make(9, global_batch_size=2, micro_batch_size=1)
    old, new = iter(one), iter(one)
    step = next(old)
    next(new)
    with pytest.raises(RuntimeError, match="this iteration of the loader is over"):
        list(step)
    with pytest.raises(RuntimeError, match="this iteration of the loader is over"):
        next(old)
    one.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="this iteration of the loader is over"):
        next(new)


@settings(max_examples=4)
@given(stop=st.integers(1, 4))
def test_workers_change_nothing_and_what_they_read_ahead_is_not_counted(stop: int) -> None:
    options = {"global_batch_size": 6, "micro_batch_size": 2, "num_epochs": 2}
    plain = make(17, **options)
    helped = make(17, num_workers=2, **options)
    first = read(helped, stop)
    assert list(map(numbers, first)) == list(map(numbers, read(plain, stop)))
    assert helped.state_dict() == plain.state_dict()
    resumed = make(17, num_workers=1, **options)
    resumed.load_state_dict(helped.state_dict())
    assert list(map(numbers, read(resumed, 99))) == list(map(numbers, read(plain, 99)))
    assert multiprocessing.active_children() == []


def test_workers_draw_nothing_from_the_global_generator() -> None:
    state = torch.get_rng_state()
    options = {"global_batch_size": 2, "micro_batch_size": 2, "seed_leaves": False}
    read(make(8, num_workers=1, **options), 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_worker_outlives_the_loop_even_when_the_step_is_kept() -> None:
    one = make(1000, global_batch_size=2, micro_batch_size=1, num_workers=2)
    kept = []
    for step in one:
        kept.append(step)
        assert len(multiprocessing.active_children()) == 2
        break
    assert multiprocessing.active_children() == []
    steps = iter(one)
    next(steps)
    assert len(multiprocessing.active_children()) == 2
    one.close()
    assert multiprocessing.active_children() == []


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        raise KeyError(f"no sample {index}")


class Deadly(Numbers):
    def __getitem__(self, index: int) -> int:
        os._exit(3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_while_reading_comes_through(num_workers: int) -> None:
    one = loader(
        Broken(8), World(), global_batch_size=2, micro_batch_size=2, num_workers=num_workers
    )
    with pytest.raises(KeyError, match="no sample"):
        read(one, 1)
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_an_error_and_no_hang() -> None:
    one = loader(Deadly(8), World(), global_batch_size=2, micro_batch_size=2, num_workers=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        read(one, 1)
    assert multiprocessing.active_children() == []


def test_a_state_of_something_else_is_refused_naming_both() -> None:
    options = {"global_batch_size": 2, "micro_batch_size": 1}
    state = make(10, seed=1, **options).state_dict()
    with pytest.raises(DataError, match=r"data set 'Numbers:10', this loader has 'Numbers:11'"):
        make(11, seed=1, **options).load_state_dict(state)
    with pytest.raises(DataError, match="with seed 1, this loader has 2"):
        make(10, seed=2, **options).load_state_dict(state)
    with pytest.raises(DataError, match="with shuffle True, this loader has False"):
        make(10, seed=1, shuffle=False, **options).load_state_dict(state)
    for wrong in (None, -1, True, "4"):
        with pytest.raises(DataError, match="no usable 'samples'"):
            make(10, seed=1, **options).load_state_dict({**state, "samples": wrong})


def test_another_global_batch_goes_on_at_the_same_sample() -> None:
    one = make(12, global_batch_size=4, micro_batch_size=2)
    whole = [
        n
        for step in read(make(12, global_batch_size=4, micro_batch_size=2), 3)
        for n in numbers(step)
    ]
    read(one, 1)
    other = make(12, global_batch_size=8, micro_batch_size=4)
    other.load_state_dict(one.state_dict())
    assert numbers(read(other, 1)[0]) == whole[4:]


@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        (8, {"global_batch_size": 6, "micro_batch_size": 4}, ConfigError, "is 4 or 8; or keep it"),
        (8, {"num_workers": -1}, ConfigError, "num_workers must be at least 0"),
        (8, {"num_epochs": 0}, ConfigError, "num_epochs must be at least 1"),
        (0, {}, DataError, "no samples"),
    ],
)
def test_bad_arguments_are_refused(
    size: int, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(size, **({"global_batch_size": 2, "micro_batch_size": 1} | options))


def test_more_ranks_than_leaves_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share 2 leaves"):
        make(8, 0, 3, global_batch_size=2, micro_batch_size=1)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1]), "list_iterator has no __len__"),
        (
            torch.utils.data.DataLoader(Numbers(4)),
            r"a DataLoader makes batches of its own: pass its data set \(dataloader.dataset\)",
        ),
        ({"train": Numbers(4), "test": Numbers(2)}, r"\('train', 'test'\): pass one of them"),
        (Numbers, r"Numbers is a class: pass an object, Numbers\(...\)"),
    ],
)
def test_what_is_no_data_set_is_named(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loader(dataset, World(), global_batch_size=1, micro_batch_size=1)


class Pairs(Numbers):
    """Pairs with ignored targets; reads several samples at once, as torch allows."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        targets = torch.tensor([1, -100, 2])
        return [(torch.full((3,), index), targets) for index in indices]


def test_targets_are_counted_without_the_ignored_ones() -> None:
    (leaf,) = read(
        loader(Pairs(4), World(), global_batch_size=2, micro_batch_size=2, shuffle=False), 1
    )[0]
    assert leaf.inputs.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert leaf.targets.shape == (2, 3)
    assert (leaf.num_samples, leaf.num_targets) == (2, 4)


def test_a_collate_function_makes_the_batch() -> None:
    one = make(4, global_batch_size=2, micro_batch_size=2, collate_fn=sorted, shuffle=False)
    assert read(one, 1)[0][0].batch == [0, 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_go_to_the_device_after_their_targets_were_counted(num_workers: int) -> None:
    """The device `meta` holds no data: counting there could only fail."""
    options = {"global_batch_size": 2, "micro_batch_size": 2, "num_workers": num_workers}
    (leaf,) = read(loader(Pairs(4), World(device="meta"), **options), 1)[0]
    assert leaf.inputs.device.type == leaf.targets.device.type == "meta"
    assert leaf.num_targets == 4
    (leaf,) = read(loader(Pairs(4), World(device="meta"), device="cpu", **options), 1)[0]
    assert leaf.inputs.device.type == "cpu"
