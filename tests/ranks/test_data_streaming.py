"""Iterable data sets: any number of ranks takes the same micro-batches; exact resume; no hang."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import IterableDataset
from torch.utils.data import DataLoader

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.loader import loader
from gradsync.data.micro_batch import MicroBatch
from gradsync.data.streaming import StreamLoader, digest_of, stream_loader
from gradsync.errors import ConfigError, DataError
from gradsync.world import World
from support.thread_ranks import run_thread_ranks

Steps = list[list[MicroBatch]]
OPTIONS: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 2}


def numbers_of(shards: list[range]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in shard:
            yield {"number": number}


def data_set(sizes: list[int]) -> IterableDataset:
    """One shard a size; shard s holds the numbers from 1000 s on."""
    shards = [range(1000 * place, 1000 * place + size) for place, size in enumerate(sizes)]
    return IterableDataset.from_generator(numbers_of, gen_kwargs={"shards": shards})


def stream(data: Any, world: World | None = None, **options: Any) -> StreamLoader:
    return stream_loader(data, world or World(), **{**OPTIONS, **options})


def read(steps: Any, count: int | None = None) -> Steps:
    return [list(step) for step in islice(steps, count)]


def numbers(steps: Steps) -> list[list[list[int]]]:
    return [[micro_batch.batch["number"].tolist() for micro_batch in step] for step in steps]


def read_all(make: Any, world_size: int, state: Any = None, **options: Any) -> list[Steps]:
    """Leaves by rank and step, from `state` on; `make(rank)` gives each rank its data set."""

    def one_rank(rank: int, group: dist.ProcessGroup) -> Steps:
        world = World(rank=rank, world_size=world_size)
        one = stream(make(rank), world, comm=ProcessGroupCommunicator(group), **options)
        if state is not None:
            one.load_state_dict(state)
        return read(one)

    return run_thread_ranks(one_rank, world_size)


def over_ranks(per_rank: list[Steps]) -> dict[tuple[int, int], list[int]]:
    """Samples by (step, micro-batch), over all ranks; no micro-batch is on two of them."""
    micro_batches = [micro_batch for steps in per_rank for step in steps for micro_batch in step]
    found = {
        (micro_batch.step, micro_batch.index): micro_batch.batch["number"].tolist()
        for micro_batch in micro_batches
    }
    assert len(found) == len(micro_batches)
    return found


@pytest.mark.parametrize("sizes", [[3, 17], [0, 9], [12], [1]])
def test_any_number_of_ranks_takes_the_same_micro_batches(sizes: list[int]) -> None:
    expected = over_ranks([read(stream(data_set(sizes), num_epochs=2))])
    assert sum(map(len, expected.values())) == 2 * sum(sizes)
    for world_size in (2, 3):
        per_rank = read_all(lambda _: data_set(sizes), world_size, num_epochs=2)
        assert over_ranks(per_rank) == expected
        assert len({len(steps) for steps in per_rank}) == 1


def test_a_stream_does_not_know_where_its_epoch_ends() -> None:
    batch = next(iter(stream_loader([1, 2, 3], World(), global_batch_size=3, micro_batch_size=1)))
    with pytest.raises(DataError, match=r"batch\.ends_epoch is not known for a stream"):
        _ = batch.ends_epoch


def test_the_micro_batches_are_those_of_a_map_style_data_set() -> None:
    rows = [{"number": number} for number in range(20)]
    known = numbers(read(loader(rows, World(), **OPTIONS, num_epochs=2, shuffle=False)))
    for data in (rows, DataLoader(rows, batch_size=None)):
        assert numbers(read(stream(data, num_epochs=2))) == known


def test_ranks_agree_on_whether_to_synchronise() -> None:
    per_rank = read_all(lambda _: data_set([9]), 3)
    last = [[[micro_batch.is_last for micro_batch in step] for step in steps] for steps in per_rank]
    assert last == [[[True], [False]], [[True], [False]], [[True], []]]
    assert numbers(per_rank[1]) == [[[2, 3]], [[8]]]


KINDS: dict[str, Any] = {
    "plain": lambda: data_set([3, 0, 17, 4]),
    "shuffled": lambda: data_set([3, 0, 17, 4]).shuffle(seed=0, buffer_size=5),
    "batched": lambda: data_set([3, 17, 4]).map(
        lambda rows: {"number": [n + 1 for n in rows["number"]]}, batched=True, batch_size=4
    ),
    "list": lambda: [{"number": number} for number in range(24)],
    "random": lambda: data_set([24]).map(
        lambda row: {"number": row["number"] + torch.rand(()) + random.random() + np.random.rand()}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_goes_on_exactly(kind: str) -> None:
    make = KINDS[kind]
    whole = numbers(read(stream(make(), num_epochs=2)))
    if kind == "shuffled":  # another order each epoch
        assert whole[:4] != whole[4:]
    for stop in (0, 3, 5, len(whole)):
        one = stream(make(), num_epochs=2)
        begun = numbers(read(one, stop))
        state = json.loads(json.dumps(one.state_dict()))
        other = stream(make(), num_epochs=2)
        other.load_state_dict(state)
        assert begun + numbers(read(other)) == whole
        assert begun + numbers(read(one)) == whole  # and so does the loader that was left


def test_another_number_of_ranks_goes_on() -> None:
    expected = over_ranks([read(stream(data_set([3, 17]), num_epochs=2))])
    one = stream(data_set([3, 17]), num_epochs=2)
    begun = over_ranks([read(one, 3)])
    rest = read_all(lambda _: data_set([3, 17]), 3, one.state_dict(), num_epochs=2)
    assert begun | over_ranks(rest) == expected


class Stateful:
    """Counts what is read."""

    def __init__(self, drift: int = 0) -> None:
        self.start, self.at, self.drift, self.reads = 0, 0, drift, [0]

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.start, 30):
            self.at, self.reads[0] = number + 1, self.reads[0] + 1
            yield {"number": number}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"] + (self.drift if state["at"] else 0)


@pytest.mark.parametrize(("drift", "reads"), [(0, 30 - 4), (1, 16 + 30)])
def test_the_data_sets_own_state_is_taken_if_it_is_exact(drift: int, reads: int) -> None:
    one = stream(Stateful(), global_batch_size=2)
    read(one, 10)  # 20 samples; the last eight steps begin at 4
    data = Stateful(drift)
    other = stream(data, global_batch_size=2)
    other.load_state_dict(one.state_dict())
    assert numbers(read(other))[0][0] == [20, 21]
    assert data.reads[0] == reads


class Packed:
    """Packs documents of five tokens into rows of four; its state holds its live buffer."""

    def __init__(self) -> None:
        self.document, self.buffer = 0, list[int]()
        self.num_read = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.document < 60:
            self.buffer.extend(range(5 * self.document, 5 * self.document + 5))
            self.document, self.num_read = self.document + 1, self.num_read + 1
            while len(self.buffer) >= 4:
                row = self.buffer[:4]
                del self.buffer[:4]
                yield row

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document, self.buffer = state["document"], state["buffer"]


def order_of(epoch: int) -> list[int]:
    return torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).tolist()


class Shuffled:
    """Has the number of the pass in its state; without `told` it counts passes itself."""

    def __init__(self, *, told: bool) -> None:
        self.epoch = self.place = 0
        if told:
            self.set_epoch = lambda epoch: vars(self).update(epoch=epoch)

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < 60:
            self.place += 1
            yield [order_of(self.epoch)[self.place - 1]]
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Asks(Shuffled):
    """Wants arguments for its state, as those of MosaicML and litData."""

    def state_dict(self, num_samples: int, *, from_beginning: bool) -> dict[str, int]:  # type: ignore
        raise AssertionError(num_samples, from_beginning)


class Stateless:
    """Counts passes itself, in another order each, and says nothing about it."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        return ([number] for number in order_of(self.epoch))


class Draws:
    """Takes its order from the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in torch.randperm(60).tolist())


class RarelyDraws:
    """Has a generator that its state lacks, and asks it for one of seven samples."""

    def __init__(self) -> None:
        self.place, self.rng = 0, random.Random(0)

    def __iter__(self) -> Iterator[list[float]]:
        while self.place < 90:
            self.place += 1
            yield [self.place + (self.rng.random() if self.place % 7 == 0 else 0)]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (Packed, 1),
        (lambda: Shuffled(told=True), 3),
        (lambda: Shuffled(told=False), 3),
        (lambda: Asks(told=True), 3),
        (lambda: Asks(told=False), 3),
        (Stateless, 3),
        (Draws, 3),
    ],
)
def test_whatever_a_data_set_keeps_all_that_follows_a_resume_is_the_same(
    make: Any, passes: int
) -> None:
    def one() -> StreamLoader:
        return stream(make(), num_epochs=passes, collate_fn=list)

    def rows(steps: Any, count: int | None = None) -> list[Any]:
        return [micro_batch.batch for step in read(steps, count) for micro_batch in step]

    whole = rows(one())
    for stop in (1, 5, 9, 11, 19, 25):
        begun, resumed = one(), one()
        first = rows(begun, stop)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert first + rows(resumed, 2) + rows(resumed) == whole
        again = one()
        state = resumed.state_dict()  # of a run that was resumed, at its end
        again.load_state_dict(state)
        assert rows(again) == []


def test_a_resume_reads_the_last_steps_again_and_not_the_whole_pass() -> None:
    """It would if the state's buffer had changed since the step that it belongs to."""
    begun, packed = stream(Packed(), collate_fn=list), Packed()
    read(begun, 12)
    stream(packed, collate_fn=list).load_state_dict(begun.state_dict())
    assert packed.num_read < packed.document == 58


def test_a_state_that_lacks_a_generator_is_found_out() -> None:
    """The last samples alone would not show it."""
    one = stream(RarelyDraws(), collate_fn=list)
    read(one, 12)
    with pytest.raises(DataError, match="other samples before step 12"):
        stream(RarelyDraws(), collate_fn=list).load_state_dict(one.state_dict())


def test_all_that_came_before_is_compared() -> None:
    one = stream(data_set([20]))
    read(one, 3)
    other = data_set([20]).map(lambda row: {"number": row["number"] + (row["number"] == 1)})
    with pytest.raises(DataError, match="other samples before step 3"):
        stream(other).load_state_dict(one.state_dict())


def test_another_stream_is_not_resumed() -> None:
    one = stream(data_set([20]))
    read(one, 2)
    for other in (data_set([5, 20]), data_set([11])):
        with pytest.raises(DataError, match="other samples before step 2"):
            stream(other).load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="saved with data set 'IterableDataset'"):
        stream([1]).load_state_dict(one.state_dict())


def other_number(rank: int) -> IterableDataset:
    return data_set([20]).map(lambda row: {"number": row["number"] + rank * (row["number"] == 9)})


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda rank: data_set([20]).shuffle(seed=rank),
            "micro-batch 0 has other samples on rank 1",
        ),
        (lambda rank: data_set([20 - rank]), r"step 3: 2 samples on rank 0, 1 on rank 1"),
        (lambda rank: data_set([12 - 6 * rank]), r"step 1: 6 samples on rank 0, 0 on rank 1"),
        (other_number, "step 1: micro-batch 1 has other samples on rank 1"),
    ],
)
def test_ranks_that_read_different_streams_are_refused(make: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        read_all(make, 2)


def test_tensors_and_images_are_compared() -> None:
    values = [torch.zeros(2), torch.zeros(2).bfloat16(), torch.ones(2), torch.zeros(2).numpy()]
    values += [b"a", b"b", "a", 1, 1.5, None, {"a": [1]}, {"a": [2]}, torch.zeros(1, 2)]
    assert len({digest_of([value]) for value in values}) == len(values)
    assert digest_of([torch.arange(6).view(2, 3).T]) == digest_of(
        [torch.arange(6).view(2, 3).T.contiguous()]
    )


class Broken:
    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        raise OSError("connection reset by storage server")


def test_a_stream_that_fails_has_not_ended_but_an_empty_one_has() -> None:
    assert list(stream(data_set([0]), num_epochs=None)) == []
    one = stream(Broken(), num_epochs=None)
    for _ in range(2):
        with pytest.raises(OSError, match="storage server"):
            read(one)
    assert one.state_dict()["samples"] == 6


class FailsOnce:
    """Loses its connection at the 20th sample, and once more while it is read again."""

    def __init__(self) -> None:
        self.fails_at = [20, 3]

    def __iter__(self) -> Iterator[int]:
        for number in range(30):
            if self.fails_at and number == self.fails_at[0]:
                del self.fails_at[0]
                raise OSError("connection reset by storage server")
            yield number


def test_what_failed_is_read_again_from_where_it_was() -> None:
    one = stream(FailsOnce())
    found: list[int] = []
    for fails in (True, True, False):
        with pytest.raises(OSError, match="storage server") if fails else nullcontext():
            for step in one:
                found += [number for micro_batch in step for number in micro_batch.batch.tolist()]
    assert found == [*range(30)]


def test_a_state_of_another_batch_size_goes_on_and_can_be_saved_again() -> None:
    one = stream([*range(60)])
    read(one, 3)
    for size in (2, 12):
        other = stream([*range(60)], global_batch_size=size)
        other.load_state_dict(one.state_dict())
        again = stream([*range(60)], global_batch_size=size)
        again.load_state_dict(other.state_dict())
        batches = [micro_batch.batch.tolist() for step in read(again) for micro_batch in step]
        assert batches == [[number, number + 1] for number in range(18, 60, 2)]


@pytest.mark.parametrize("damage", [{"first": 3}, {"recent": {}}, {"first": None}, {"recent": []}])
def test_places_that_are_none_are_passed_over(damage: dict[str, Any]) -> None:
    one = stream([*range(60)])
    read(one, 3)
    other = stream([*range(60)])
    other.load_state_dict(one.state_dict() | damage)
    assert next(iter(next(iter(other)))).batch.tolist() == [18, 19]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([1], {"global_batch_size": 7}, "global_batch_size=7 is not a multiple"),
        ([1], {"num_epochs": 0}, "num_epochs must be at least 1; got 0"),
        (iter([1]), {"num_epochs": 2}, "list_iterator can be read once and num_epochs is 2"),
        (DataLoader([1, 2]), {}, "DataLoader gives batches, not samples: give it batch_size=None"),
    ],
)
def test_misuse_is_named(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        stream(data, **options)
