"""Hugging Face iterable data sets on ranks as threads, offline."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from datasets import IterableDataset

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.leaf import Leaf
from gradsync.data.streaming import stream_loader
from gradsync.errors import ConfigError
from gradsync.world import World
from support.thread_ranks import run_thread_ranks


def numbers_of(shards: list[range]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in shard:
            yield {"number": number}


def data_set(sizes: list[int]) -> IterableDataset:
    """One shard a size; shard s holds the numbers from 1000 s on."""
    shards = [range(1000 * place, 1000 * place + size) for place, size in enumerate(sizes)]
    return IterableDataset.from_generator(numbers_of, gen_kwargs={"shards": shards})


def read_all(sizes: list[int], world_size: int, **options: int) -> list[list[list[Leaf]]]:
    """Leaves by rank and step."""
    data = data_set(sizes)
    lock = threading.Lock()

    def one_rank(rank: int, group: dist.ProcessGroup) -> list[list[Leaf]]:
        with lock:  # splitting copies the shared data set
            steps = stream_loader(
                data,
                World(rank=rank, world_size=world_size),
                comm=ProcessGroupCommunicator(group),
                **options,
            )
        found = []
        for number, step in enumerate(steps):
            assert step.number == number
            found.append(list(step))
            assert len(step) == len(found[-1])
        return found

    return run_thread_ranks(one_rank, world_size)


@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [
        ([3, 17], 2),  # a shard each, very unequal
        ([0, 9], 2),  # one rank has nothing at all
        ([10], 3),  # one shard for three ranks: each skips the others' samples
        ([4, 4], 1),
    ],
)
def test_uneven_shares_end_together_and_lose_nothing(sizes: list[int], world_size: int) -> None:
    per_rank = read_all(sizes, world_size, micro_batch_size=2, leaves_per_rank=2)
    assert len({len(steps) for steps in per_rank}) == 1
    seen = [
        n
        for steps in per_rank
        for leaves in steps
        for leaf in leaves
        for n in leaf.batch["number"].tolist()
    ]
    assert sorted(seen) == sorted(
        1000 * place + n for place, size in enumerate(sizes) for n in range(size)
    )
    assert sum(leaf.num_samples for steps in per_rank for step in steps for leaf in step) == (
        len(seen)
    )


def test_ranks_agree_on_whether_to_synchronise() -> None:
    per_rank = read_all([3, 17], 2, micro_batch_size=2, leaves_per_rank=2)
    shapes = [[[leaf.is_last for leaf in leaves] for leaves in steps] for steps in per_rank]
    assert shapes[0] == [[False, True], [], [], [], []]
    assert shapes[1] == [[False, True], *[[False, False]] * 3, [False]]
    indices = [[[leaf.index for leaf in leaves] for leaves in steps] for steps in per_rank]
    assert indices[0][0] == [0, 1]
    assert indices[1][1] == [2, 3]


def test_every_epoch_is_read_and_numbered_on() -> None:
    per_rank = read_all([3, 5], 2, micro_batch_size=2, leaves_per_rank=1, num_epochs=2)
    seen = Counter(
        n
        for steps in per_rank
        for leaves in steps
        for leaf in leaves
        for n in leaf.batch["number"].tolist()
    )
    assert set(seen.values()) == {2}
    assert [leaf.step for step in per_rank[1] for leaf in step] == list(range(6))


def test_a_shuffled_stream_has_another_order_each_epoch() -> None:
    data = data_set([40]).shuffle(seed=0, buffer_size=40)
    steps = stream_loader(
        data,
        World(),
        micro_batch_size=40,
        leaves_per_rank=1,
        num_epochs=2,
    )
    first, second = (leaf.batch["number"].tolist() for step in steps for leaf in step)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(40))


def test_an_empty_stream_without_end_ends() -> None:
    one = stream_loader(
        data_set([0]),
        World(),
        micro_batch_size=1,
        leaves_per_rank=1,
        num_epochs=None,
    )
    assert list(one) == []
    with pytest.raises(ConfigError, match="leaves_per_rank must be at least 1; got 0"):
        stream_loader([], World(), micro_batch_size=1, leaves_per_rank=0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets.distributed", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradsync\[data\]'"):
        stream_loader([], World(), micro_batch_size=1, leaves_per_rank=1)
