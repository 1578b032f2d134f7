"""The loader's promise: order, draws and exactness depend neither on world size nor on workers."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from gradsync.comm.groups import SingleCommunicator
from gradsync.data.loader import EvalLoader, Loader, glimpse_of, loader
from gradsync.data.micro_batch import MicroBatch
from gradsync.data.streaming import StreamLoader, stream_loader
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import seed_micro_batch
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


def read(one: Loader, num_steps: int | None = None) -> list[list[MicroBatch]]:
    """This rank's micro-batches of the next steps, at most `num_steps`."""
    steps = []
    for step in one if num_steps != 0 else ():
        steps.append(list(step))
        assert len(step) == len(steps[-1])
        if len(steps) == num_steps:
            break
    return steps


def numbers(micro_batches: list[MicroBatch]) -> list[int]:
    return [number for micro_batch in micro_batches for number in micro_batch.batch.tolist()]


def together(loaders: list[Loader], num_steps: int | None = None) -> list[list[MicroBatch]]:
    """The micro-batches of all ranks, step by step in rank order."""
    per_rank = [read(one, num_steps) for one in loaders]
    return [
        [micro_batch for micro_batches in step for micro_batch in micro_batches]
        for step in zip(*per_rank, strict=True)
    ]


@dataclass
class Case:
    size: int
    micro: int
    micro_batches: int
    worlds: tuple[int, int]
    epochs: int
    stop: int
    shuffle: bool

    def ranks(self, world_size: int) -> list[Loader]:
        options = {
            "global_batch_size": self.micro * self.micro_batches,
            "micro_batch_size": self.micro,
            "num_epochs": self.epochs,
            "shuffle": self.shuffle,
            "seed": 11,
        }
        return [make(self.size, rank, world_size, **options) for rank in range(world_size)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    micro_batches = draw(st.integers(1, 9))
    return Case(
        size=draw(st.integers(1, 50)),
        micro=draw(st.integers(1, 5)),
        micro_batches=micro_batches,
        worlds=(draw(st.integers(1, micro_batches)), draw(st.integers(1, micro_batches))),
        epochs=draw(st.integers(1, 3)),
        stop=draw(st.integers(0, 12)),
        shuffle=draw(st.booleans()),
    )


@given(case=cases())
def test_all_ranks_together_read_exactly_the_global_batches_in_order(case: Case) -> None:
    one = together(case.ranks(1))
    per_rank = [read(rank) for rank in case.ranks(case.worlds[0])]
    stream = [number for step in one for number in numbers(step)]
    for number, step in enumerate(zip(*per_rank, strict=True)):
        micro_batches = [micro_batch for mine in step for micro_batch in mine]
        assert numbers(micro_batches) == numbers(one[number])
        assert [micro_batch.index for micro_batch in micro_batches] == list(
            range(len(micro_batches))
        )
        assert {micro_batch.step for micro_batch in micro_batches} <= {number}
        assert all(
            micro_batch.num_samples == micro_batch.num_targets == len(micro_batch.batch)
            for micro_batch in micro_batches
        )
        for mine in step:  # all ranks agree on whether to synchronise
            last = [all(step) and place == len(mine) for place in range(1, len(mine) + 1)]
            assert [micro_batch.is_last for micro_batch in mine] == last
    assert len(one) == number + 1
    assert all(len(numbers(step)) == case.micro * case.micro_batches for step in one[:-1])
    epochs = [stream[at : at + case.size] for at in range(0, len(stream), case.size)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(case.size))] * case.epochs


@given(case=cases())
def test_a_resumed_run_goes_on_alike_at_another_world_size(case: Case) -> None:
    undisturbed = together(case.ranks(1))
    before = case.ranks(case.worlds[0])
    first = together(before, case.stop)
    states = [json.loads(json.dumps(one.state_dict())) for one in before]
    assert all(state == states[0] for state in states)
    after = case.ranks(case.worlds[1])
    for one in after:
        one.load_state_dict(states[0])
    resumed = first + together(after)
    assert [numbers(step) for step in resumed] == [numbers(step) for step in undisturbed]
    places = [[(micro_batch.step, micro_batch.index) for micro_batch in step] for step in resumed]
    assert places == [
        [(micro_batch.step, micro_batch.index) for micro_batch in step] for step in undisturbed
    ]


def test_the_stream_has_no_end_by_default_and_epochs_advance_alone() -> None:
    one = make(10, global_batch_size=4, micro_batch_size=2)
    stream = [n for step in read(one, 25) for n in numbers(step)]
    assert Counter(stream) == dict.fromkeys(range(10), 10)
    assert one.epoch == 10.0
    assert stream[:10] != stream[10:20]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_micro_batches_that_nobody_read_do_not_shift_the_following_steps(num_workers: int) -> None:
    options = {"global_batch_size": 6, "micro_batch_size": 2, "num_workers": num_workers}
    whole = read(make(24, **options), 4)
    one = make(24, **options)
    steps = iter(one)
    next(steps)
    micro_batch = next(iter(next(steps)))
    assert micro_batch.batch.tolist() == whole[1][0].batch.tolist()
    assert numbers(list(next(steps))) == numbers(whole[2])
    one.close()


def test_what_comes_too_late_says_so() -> None:
    """A step read twice, or after the next began; an iteration that was overtaken or moved."""
    one = make(9, global_batch_size=2, micro_batch_size=1)
    steps = iter(one)
    first = next(steps)
    list(first)
    with pytest.raises(RuntimeError, match="micro-batches of step 0 can be read once"):
        list(first)
    second, third = next(steps), next(steps)
    with pytest.raises(RuntimeError, match="micro-batches of step 1 can be read once"):
        list(second)
    new = iter(one)
    next(new)
    for late in (lambda: list(third), lambda: next(steps)):
        with pytest.raises(RuntimeError, match="this iteration of the loader is over"):
            late()
    one.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="this iteration of the loader is over"):
        next(new)


# -- workers ---------------------------------------------------------------------------------------


@settings(max_examples=2)
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
    assert list(map(numbers, read(resumed))) == list(map(numbers, read(plain)))
    assert multiprocessing.active_children() == []
    state = torch.get_rng_state()  # workers draw nothing from the global generator
    read(make(8, num_workers=1, seed_micro_batches=False, **options), 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_worker_outlives_the_loop_even_when_the_step_is_kept() -> None:
    one = make(1000, global_batch_size=2, micro_batch_size=1, num_workers=2)
    steps = iter(one)
    kept = next(steps)
    assert len(multiprocessing.active_children()) == 2
    one.close()
    assert multiprocessing.active_children() == []
    for step in one:
        kept = step
        break
    assert multiprocessing.active_children() == []
    assert len(kept) == 2


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        raise KeyError(f"no sample {index}")


class Deadly(Numbers):
    def __getitem__(self, index: int) -> int:
        os._exit(3)


class Killed(Numbers):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory ends
        return index


@pytest.mark.parametrize(
    ("data", "num_workers", "error", "message"),
    [
        (Broken(8), 0, KeyError, "no sample"),
        (Broken(8), 1, KeyError, "no sample"),
        (Deadly(8), 1, RuntimeError, "exited unexpectedly"),
        (Killed(8), 1, RuntimeError, r"worker .*\d+\) (is killed by signal|exited unexpectedly)"),
    ],
)
def test_an_error_while_reading_comes_through_and_is_no_hang(
    data: Numbers, num_workers: int, error: type[Exception], message: str
) -> None:
    options = {"global_batch_size": 2, "micro_batch_size": 2, "num_workers": num_workers}
    with pytest.raises(error, match=message):
        read(loader(data, World(), **options), 1)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # that becomes spawn
def test_workers_leave_stop_signals_to_their_rank(method: str) -> None:
    options = {"worker_options": {"multiprocessing_context": method}, "num_epochs": 1}
    one = loader(Numbers(24), World(), **OPTIONS, num_workers=1, **options)
    steps = iter(one)
    found = numbers(list(next(steps)))
    workers = multiprocessing.active_children()
    for name in ("TERM", "TERM", "USR1", "INT", "HUP"):  # to the group, say; by another process
        subprocess.run(["kill", f"-{name}", *(str(each.pid) for each in workers)], check=True)
    found += [number for step in steps for number in numbers(list(step))]
    assert sorted(found) == list(range(24))
    assert [worker.exitcode for worker in workers] == [0]


# -- what is refused -------------------------------------------------------------------------------


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
    read(one, 1)
    other = make(12, global_batch_size=8, micro_batch_size=4)
    other.load_state_dict(one.state_dict())
    assert numbers(read(other, 1)[0]) == [n for step in read(one, 2) for n in numbers(step)]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(8), {"global_batch_size": 6, "micro_batch_size": 4}, "is 4 or 8"),
        (Numbers(8), {"num_epochs": 0}, "num_epochs must be at least 1"),
        (Numbers(8), {"worker_options": {"timeout": 1, "in_order": 0}}, "; got 'in_order'"),
        (Numbers(0), {}, "no samples"),
        (iter([1]), {}, "list_iterator has no __len__"),
        (torch.utils.data.DataLoader(Numbers(4)), {}, "a DataLoader: give its data set instead"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        loader(dataset, World(), **({"global_batch_size": 2, "micro_batch_size": 1} | options))


# -- data sets -------------------------------------------------------------------------------------


class Pairs(Numbers):
    """Pairs with ignored targets; reads several samples at once, as torch allows."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        targets = torch.tensor([1, -100, 2])
        return [(torch.full((3,), index), targets) for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_go_to_the_device_after_their_targets_were_counted(num_workers: int) -> None:
    """The device `meta` holds no data: counting there could only fail."""
    options = {"global_batch_size": 2, "micro_batch_size": 2, "num_workers": num_workers}
    (micro_batch,) = read(loader(Pairs(4), World(device_name="meta"), **options), 1)[0]
    assert micro_batch.inputs.device.type == micro_batch.targets.device.type == "meta"
    assert (micro_batch.num_samples, micro_batch.num_targets) == (2, 4)
    (micro_batch,) = read(loader(Pairs(4), World(device_name="meta"), device="cpu", **options), 1)[
        0
    ]
    assert micro_batch.inputs.shape == micro_batch.targets.shape == (2, 3)
    one = make(4, collate_fn=sorted, shuffle=False, **options)  # makes the batch
    assert read(one, 1)[0][0].batch == [0, 1]


def test_hugging_face_data_sets_are_read_as_they_are() -> None:
    """They too have a method `batch`, with other arguments: that name says nothing."""
    columns = {"number": list(range(10)), "text": list("abcdefghij")}
    data = datasets.Dataset.from_dict(columns).with_format("torch")
    options = {"global_batch_size": 4, "micro_batch_size": 2, "num_epochs": 1}
    one = loader(data, World(), **options)
    batches = [micro_batch.batch for step in one for micro_batch in step]
    found = [n for batch in batches for n in batch["number"].tolist()]
    assert sorted(found) == list(range(10))
    texts = [text for batch in batches for text in batch["text"]]
    assert texts == ["abcdefghij"[n] for n in found]
    assert one.state_dict()["dataset"] == f"Dataset:10:{data._fingerprint}"
    data.fingerprint = "mine"  # a name given by the user comes first
    assert loader(data, World(), **options).state_dict()["dataset"] == "Dataset:10:mine"


# -- draws -----------------------------------------------------------------------------------------

Drawn = dict[tuple[int, int], list[float]]
"""By (step, micro-batch): the next random numbers when the micro-batch was handed out."""
OPTIONS: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 2}


@pytest.fixture
def random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


class Noisy:
    """Samples are drawn anew whenever they are read, from all global generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.tensor(draw_from_all())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))


def draw_from_all() -> list[float]:
    """One number of each global generator."""
    return [torch.rand(()).item(), random.random(), np.random.rand()]


def draw(steps: Any, num_steps: int = 3) -> Drawn:
    """Numbers drawn at each micro-batch, as dropout would, with other draws in between."""
    drawn = {}
    for step in islice(steps, num_steps):
        for micro_batch in step:
            drawn[micro_batch.step, micro_batch.index] = torch.rand(3).tolist()
            torch.rand(micro_batch.index)
        torch.rand(5)
    return drawn


def of_batches(steps: Any) -> Drawn:
    return {
        (micro_batch.step, micro_batch.index): micro_batch.batch.tolist()
        for s in islice(steps, 2)
        for micro_batch in s
    }


def over_ranks(
    world_size: int, data: Any = range(12), take: Callable[[Any], Drawn] = draw, **options: Any
) -> Drawn:
    """Draws of all ranks, one rank after the other, each from another state."""
    drawn: Drawn = {}
    for rank in range(world_size):
        torch.manual_seed(rank)
        drawn |= take(loader(data, World(rank=rank, world_size=world_size), **OPTIONS, **options))
    return drawn


def keyed(seed: int, keys: Any) -> Drawn:
    drawn = {}
    for step, micro_batch in keys:
        seed_micro_batch(seed, step, micro_batch)
        drawn[step, micro_batch] = torch.rand(3).tolist()
    return drawn


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_draws_are_keyed_by_seed_step_and_micro_batch(world_size: int, num_workers: int) -> None:
    drawn = over_ranks(world_size, seed=5, num_workers=num_workers)
    assert sorted(drawn) == [(step, micro_batch) for step in range(3) for micro_batch in range(6)]
    assert drawn == keyed(5, drawn)
    others = [*drawn.values(), *keyed(6, drawn).values()]
    assert len({tuple(numbers) for numbers in others}) == 36
    batches = over_ranks(world_size, Noisy(), of_batches, num_workers=num_workers)
    assert batches == over_ranks(1, Noisy(), of_batches)
    noise = [
        number % 1
        for micro_batch in batches.values()
        for sample in micro_batch
        for number in sample
    ]
    assert len(set(noise)) == len(noise) == 12 * 2 * 3


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("make", [loader, stream_loader])
def test_what_a_read_draws_does_not_shift_what_the_program_draws(make: Any) -> None:
    def drawn(data: Any) -> list[float]:
        steps = make(data, World(), **OPTIONS, num_epochs=2)
        return [each for step in steps for _ in step for each in draw_from_all()]

    assert drawn(Noisy()) == drawn([torch.zeros(3)] * 12)
    assert len(set(drawn(Noisy()))) == 2 * 6 * 3


def test_a_loader_without_a_seed_takes_that_of_init() -> None:
    def order(world_seed: int, **options: Any) -> Drawn:
        return of_batches(loader(range(12), World(seed=world_seed), **OPTIONS, **options))

    assert order(0) == order(7, seed=0) != order(7) == order(0, seed=7)
    assert (
        stream_loader(
            range(8), World(seed=7), global_batch_size=2, micro_batch_size=1
        ).state_dict()["seed"]
        == 7
    )


def test_a_loader_at_its_end_says_why_it_gives_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """To a second loop, and to a run that was over before it was started again."""
    one, again = (loader(range(12), World(), **OPTIONS, num_epochs=1) for _ in range(2))
    assert len(list(one)) == 1
    assert not caplog.messages
    again.load_state_dict(one.state_dict())
    assert list(one) == list(again) == []
    assert len(caplog.messages) == 2
    for said in caplog.messages:
        assert "gs.load restored a finished run" in said
        assert "one loop gives all epochs" in said


def stream(rank: int, **options: Any) -> StreamLoader:
    """Rank `rank` of two, which agrees with itself alone."""
    return stream_loader(
        range(12),
        World(rank=rank, world_size=2),
        **{**OPTIONS, "global_batch_size": 8},
        comm=SingleCommunicator(),
        num_epochs=2,
        collate_fn=torch.tensor,
        seed=5,
        **options,
    )


ByPlace = dict[str, list[list[float]]]
"""Numbers drawn before and behind the micro-batches of each step."""


def around_micro_batches(steps: Any) -> ByPlace:
    """Draw in a loop over steps, where dropout would draw at the micro-batches too."""
    drawn: ByPlace = {"before": [], "behind": []}
    for step in steps:
        drawn["before"].append(draw_from_all())
        for micro_batch in step:
            len(micro_batch.batch)
            torch.rand(micro_batch.index)
        drawn["behind"].append(draw_from_all())
    return drawn


def make_any(kind: str, rank: int = 0, world_size: int = 1) -> Any:
    world = World(rank=rank, world_size=world_size, seed=5)
    if kind == "stream":
        alone = SingleCommunicator()
        return stream_loader([*range(36)], world, **OPTIONS, comm=alone, num_epochs=1)
    return loader(range(36), world, **OPTIONS, num_epochs=1, num_workers=int(kind == "workers"))


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("kind", ["loader", "workers", "stream"])
def test_what_is_drawn_once_a_step_is_the_steps(kind: str) -> None:
    whole = around_micro_batches(make_any(kind))
    numbers = [number for place in whole.values() for step in place for number in step]
    assert len(set(numbers)) == 2 * 3 * 3
    for rank in range(3):
        assert around_micro_batches(make_any(kind, rank, 3)) == whole
    one, other = make_any(kind), make_any(kind)
    around_micro_batches(islice(one, 1))
    other.load_state_dict(one.state_dict())
    assert around_micro_batches(other) == {place: drawn[1:] for place, drawn in whole.items()}


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("kind", ["loader", "stream"])
@pytest.mark.parametrize("take", [list, tuple])
def test_micro_batches_that_are_taken_at_once_draw_what_they_draw_in_a_loop(
    kind: str, take: Any
) -> None:
    """As dropout does, behind the first look at the batch."""
    expected = {
        (micro_batch.step, micro_batch.index): draw_from_all()
        for step in make_any(kind)
        for micro_batch in step
    }
    found, lambdas = {}, []
    for step in make_any(kind):
        micro_batches = take(step)
        lambdas.append(draw_from_all())
        for micro_batch in micro_batches:
            assert len(micro_batch.batch) == 2
            found[micro_batch.step, micro_batch.index] = draw_from_all()
            assert len(micro_batch.inputs) == 2  # is no first look
            assert draw_from_all() != found[micro_batch.step, micro_batch.index]
    assert found == expected
    assert lambdas == around_micro_batches(make_any(kind))["behind"]


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("make", [loader, stream_loader])
def test_what_a_collate_function_draws_is_the_micro_batchs(make: Any) -> None:
    def masked(rows: list[Any]) -> list[float]:
        return [row * random.random() + np.random.rand() for row in rows]

    def batches(rank: int, world_size: int, skip: int = 0) -> Drawn:
        random.seed(rank)
        np.random.seed(rank)
        options = {"collate_fn": masked, "num_epochs": 1, "seed": 5, **OPTIONS}
        options |= {"comm": SingleCommunicator()} if make is stream_loader else {"shuffle": False}

        def one() -> Any:
            return make([*range(1, 37)], World(rank=rank, world_size=world_size), **options)

        first, second = one(), one()
        assert all(list(step) for step in islice(first, skip))
        second.load_state_dict(first.state_dict())
        return {
            (micro_batch.step, micro_batch.index): micro_batch.batch
            for step in second
            for micro_batch in step
        }

    whole = batches(0, 1)
    assert {key: whole[key] for key in whole if key[0]} == batches(0, 1, skip=1)
    assert whole == {key: b for rank in range(3) for key, b in batches(rank, 3).items()}


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize("ends", [True, False])
def test_ranks_draw_alike_after_the_loop(ends: bool) -> None:
    """As the initial weights of another model; the last micro-batch is another one on each rank."""

    def after(steps: Any) -> list[float]:
        for step in steps:
            for _ in step:
                torch.rand(3)
            if not ends and step.number == 0:
                break
        return torch.rand(2).tolist()

    def of_rank(rank: int, world_size: int) -> Any:
        world = World(rank=rank, world_size=world_size)
        return loader(range(24), world, **OPTIONS, num_epochs=1)

    found = [after(of_rank(rank, size)) for size in (1, 2, 3) for rank in range(size)]
    assert found == found[:1] * 6
    assert found[0] != after(stream(0))
    assert after(stream(0)) == after(stream(1))


@pytest.mark.usefixtures("random_state")
@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(range(12), World(), **OPTIONS, seed_micro_batches=False),
        lambda: stream(0, seed_micro_batches=False),
    ],
    ids=["loader", "stream"],
)
def test_generators_are_left_alone_on_request(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    drawn = draw(make(), 1)
    torch.manual_seed(3)
    for micro_batch in range(len(drawn)):
        assert drawn[0, micro_batch] == torch.rand(3).tolist()
        torch.rand(micro_batch)


# -- evaluation, and batches without steps ---------------------------------------------------------


@given(
    size=st.integers(1, 60),
    micro=st.integers(1, 9),
    world_size=st.integers(1, 10),
    most=st.none() | st.integers(1, 70),
)
def test_evaluation_sees_each_sample_once_on_one_rank(
    size: int, micro: int, world_size: int, most: int | None
) -> None:
    data = list(range(size))
    seen, places = [], []
    for rank in range(world_size):
        micro_batches = EvalLoader(
            data, World(rank=rank, world_size=world_size), micro, max_samples=most
        )
        for _ in range(2):  # it may be gone through again
            found = list(micro_batches)
        assert len(found) == len(micro_batches) <= micro_batches.most
        assert not any(micro_batch.is_last for micro_batch in found)
        seen += numbers(found)
        places += [micro_batch.index for micro_batch in found]
    assert seen == data[:most]
    assert places == list(range(-(-len(seen) // micro)))
    assert micro_batches.total_samples == len(seen)


def test_senseless_sizes_of_an_evaluation_are_refused() -> None:
    for micro, most in ((0, None), (1, 0)):
        with pytest.raises(ConfigError, match="must be at least 1; got 0"):
            EvalLoader([1], World(), micro, most)


def random_data(seed: int, kind: type = TensorDataset) -> Any:
    numbers = torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(seed))
    if kind is np.ndarray:
        return numbers.numpy()
    if kind is list:
        return [{"row": row, "text": "a"} for row in numbers]
    if kind is Attributes:
        return Attributes(numbers)
    whole = TensorDataset(numbers, torch.arange(50))
    return Subset(whole, range(5, 45)) if kind is Subset else whole


class FileNames:
    def __init__(self, paths: list[str]) -> None:
        self.paths, self.root, self.rank = paths, paths[0], os.getpid()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


class Attributes(FileNames):
    """A class of the user's that makes its numbers up."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(["a"])
        self.paths, self.x = [], x


@pytest.mark.parametrize("kind", [TensorDataset, Subset, np.ndarray, list, Attributes])
def test_data_in_memory_are_told_apart_by_their_numbers(kind: type) -> None:
    found = glimpse_of(random_data(0, kind))
    assert found == glimpse_of(random_data(0, kind)) != glimpse_of(random_data(1, kind))


@pytest.mark.parametrize("make", [list, lambda rows: Subset(Numbers(12), rows)])
def test_data_that_ranks_divide_themselves_are_told_apart(make: Callable[[Any], Any]) -> None:
    """As a DistributedSampler would: gs.loader divides them a second time."""
    first, second = (glimpse_of(make(range(rank, 12, 2))) for rank in range(2))
    assert "" != first != second


def test_files_are_told_apart_by_their_names_and_not_by_their_folders() -> None:
    def found(*names: str, folder: int = 0) -> str:
        return glimpse_of(FileNames([f"/scratch/{folder}/{name}" for name in names]))

    assert found("a.png", "b.png") == found("a.png", "b.png", folder=1) != found("b.png", "a.png")


class Transformed(FileNames):
    """Wraps a data set, as programs do to augment one side of a split."""

    def __init__(self, inner: Any) -> None:
        super().__init__(["a"])
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)


WHOLE = TensorDataset(torch.arange(20.0)[:, None])
SPLITS: dict[str, Callable[[list[int]], Any]] = {
    "subset": lambda rows: Subset(WHOLE, rows),
    "of a subset": lambda rows: Subset(Subset(WHOLE, rows), range(10)),
    "wrapped": lambda rows: Transformed(Subset(WHOLE, rows)),
    "joined": lambda rows: ConcatDataset([Subset(WHOLE, rows[:6]), Subset(WHOLE, rows[6:])]),
    "tensor": lambda rows: TensorDataset(torch.arange(20)[rows]),
    "files": lambda rows: FileNames([f"{row}.png" for row in rows]),
    "list": lambda rows: rows,
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_state_of_another_split_of_one_data_set_is_refused(kind: str) -> None:
    def of(rows: list[int]) -> Loader:
        return loader(SPLITS[kind](rows), World(), **OPTIONS)

    rows = [*range(12)]
    state = of(rows).state_dict()
    of([*range(12)]).load_state_dict(state)
    with pytest.raises(DataError, match=r"saved with samples '.*random_split"):
        of(rows[::-1]).load_state_dict(state)
    with pytest.raises(DataError, match="saved with samples"):
        of([*range(8, 20)]).load_state_dict(state)
    del state["glimpse"]  # as of an earlier version
    of(rows[::-1]).load_state_dict(state)


@pytest.mark.parametrize(
    ("num_samples", "ends"), [(8, "0101"), (10, "00101"), (3, "111111"), (20, "0000100001")]
)
def test_a_batch_says_that_an_epoch_ends_in_it(num_samples: int, ends: str) -> None:
    """On all ranks, and after a resume."""
    sizes = {"global_batch_size": 4, "micro_batch_size": 2}
    for rank in range(2):
        made = loader(range(num_samples), World(rank=rank, world_size=2), **sizes)
        batches = zip(ends, made, strict=False)
        assert all(batch.ends_epoch == (end == "1") for end, batch in batches)
    again = loader(range(num_samples), World(), **sizes)
    again.load_state_dict({**again.state_dict(), "samples": 4, "steps": 1})
    assert next(iter(again)).ends_epoch == (ends[1] == "1")
