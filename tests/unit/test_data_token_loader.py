"""Token files through the loader, the exact evaluation and `DatasetLoader`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.loader import DatasetLoader, EvalLeaves, loader
from gradsync.data.tokens import TokenDataset
from gradsync.errors import ConfigError, DataError
from gradsync.world import World


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """42 samples of 4 tokens; sample i begins with token 4i."""
    np.arange(42 * 4 + 1, dtype=np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path


def test_workers_read_the_same_tokens(directory: Path) -> None:
    data = TokenDataset(directory / "train.bin", 4)
    options = {"global_batch_size": 8, "micro_batch_size": 4, "num_epochs": 1}
    plain, helped = (
        [leaf for step in loader(data, World(), num_workers=n, **options) for leaf in step]
        for n in (0, 2)
    )
    assert len(plain) == len(helped) == 11
    for mine, theirs in zip(plain, helped, strict=True):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
        assert mine.num_targets == theirs.num_targets


def test_every_token_is_a_target_once_an_epoch(directory: Path) -> None:
    data = TokenDataset(directory / "train.bin", 4)
    one = loader(data, World(), global_batch_size=6, micro_batch_size=3, num_epochs=1)
    leaves = [leaf for step in one for leaf in step]
    assert sorted(t for leaf in leaves for t in leaf.targets.flatten().tolist()) == list(
        range(1, 169)
    )
    assert sum(leaf.num_targets for leaf in leaves) == 168
    assert data.fingerprint in one.state_dict()["dataset"]


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
        world = World(rank=rank, world_size=world_size)
        leaves = EvalLeaves(data, world, micro, max_samples=most)
        for _ in range(2):  # it may be gone through again
            found = list(leaves)
        assert len(found) == len(leaves)
        assert not any(leaf.is_last for leaf in found)
        seen += [n for leaf in found for n in leaf.batch.tolist()]
        places += [leaf.index for leaf in found]
        counted = sum(leaf.num_samples for leaf in found)
        assert counted <= leaves.total_samples
    assert seen == data[:most]
    assert places == list(range(-(-len(seen) // micro)))
    assert leaves.total_samples == len(seen)


def test_evaluation_refuses_senseless_numbers() -> None:
    with pytest.raises(ConfigError, match="max_samples must be at least 1; got 0"):
        EvalLeaves([1], World(), 1, max_samples=0)
    with pytest.raises(ConfigError, match="micro_batch_size must be at least 1"):
        EvalLeaves([1], World(), 0)


def test_dataset_loaders_of_one_call_are_disjoint_and_together_complete(directory: Path) -> None:
    ranks = [DatasetLoader(2, 4, rank, 3, directory) for rank in range(3)]
    calls = [[one.next_batch() for one in ranks] for _ in range(14)]  # two epochs
    for epoch in (calls[:7], calls[7:]):
        inputs = torch.cat([x for call in epoch for x, _ in call])
        assert inputs.shape == (42, 4)
        assert sorted(inputs[:, 0].tolist()) == list(range(0, 168, 4))
    assert all(torch.equal(x + 1, y) for call in calls for x, y in call)


def test_a_dataset_loader_goes_on_with_another_number_of_processes(directory: Path) -> None:
    def firsts(ranks: list[DatasetLoader]) -> list[int]:
        return [n for one in ranks for n in one.next_batch()[0][:, 0].tolist()]

    def make(num_processes: int) -> list[DatasetLoader]:
        return [
            DatasetLoader(6 // num_processes, 4, rank, num_processes, directory, seed=5)
            for rank in range(num_processes)
        ]

    undisturbed = make(1)
    expected = [firsts(undisturbed) for _ in range(4)]
    before = make(2)
    assert [firsts(before) for _ in range(2)] == expected[:2]
    after = make(3)
    firsts(after)  # loading ends what a loader was doing
    for one in after:
        one.load_state_dict(before[0].state_dict())
    assert [firsts(after) for _ in range(2)] == expected[2:]


def test_a_dataset_loader_iterates_for_ever(directory: Path) -> None:
    batches = iter(DatasetLoader(40, 4, 0, 1, directory))
    assert [next(batches)[0].shape for _ in range(5)] == [(40, 4)] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"seq_len": -2}, "seq_len must be at least 1; got -2"),
        ({"num_processes": 0}, "num_processes must be at least 1"),
        ({"process_rank": 2}, "process_rank must be in 0..1; got 2"),
        ({"process_rank": -1}, "process_rank must be in 0..1; got -1"),
    ],
)
def test_a_dataset_loader_checks_its_arguments(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    arguments = {"batch": 1, "seq_len": 4, "process_rank": 0, "num_processes": 2}
    with pytest.raises(ConfigError, match=message):
        DatasetLoader(**(arguments | changes), dataset_dir=directory)
    with pytest.raises(DataError, match=r"val.bin does not exist"):
        DatasetLoader(**arguments, dataset_dir=directory, split="val")
