"""Batches under other projects' names: exact shares of a pass, and disjoint batches of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsync.compat import DatasetLoader
from gradsync.compat.manager import BatchLoader
from gradsync.errors import ConfigError
from gradsync.world import World


def loaders(size: int, batch_size: int, ranks: int = 1, **options: Any) -> list[BatchLoader]:
    worlds = [World(rank=rank, world_size=ranks, local_world_size=ranks) for rank in range(ranks)]
    return [BatchLoader(range(size), world, batch_size, **options) for world in worlds]


def samples(batches: BatchLoader) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("size", [3, 4, 7, 10, 13, 24])
def test_a_pass_is_each_sample_once(size: int, batch_size: int, ranks: int) -> None:
    """Every rank has as many batches, none of them empty or longer than `batch_size`."""
    made = loaders(size, batch_size, ranks)
    for _ in range(2):
        taken = [[batch.tolist() for batch in batches] for batches in made]
        assert {len(mine) for mine in taken} == {len(made[0])}
        lengths = [[len(batch) for batch in mine] for mine in taken]
        assert all(0 < length <= batch_size for mine in lengths for length in mine)
        assert sorted(n for mine in taken for batch in mine for n in batch) == list(range(size))
        assert [sum(mine) for mine in lengths] == [len(batches.sampler) for batches in made]


def test_orders() -> None:
    """Ten samples, four a step: each pass is all ten, in the data set's own order."""
    first, second = loaders(10, 2, 2, shuffle=False)
    for _ in range(2):
        assert [batch.tolist() for batch in first] == [[0, 1], [4, 5], [8]]
        assert [batch.tolist() for batch in second] == [[2, 3], [6, 7], [9]]
    # 6, then 4 of 7: none is empty
    lengths = [[len(batch) for batch in each] for each in loaders(13, 2, 3)]
    assert lengths == [[2, 1, 1], [2, 1, 1], [2, 2, 1]]
    (whole,) = loaders(5, 2, drop_last=True)
    assert [[len(batch) for batch in whole] for _ in range(2)] == [[2, 2], [2, 2]]


def test_passes_as_torchs_loader_has_them() -> None:
    """A look at the first batch costs a pass no sample; `set_epoch` names the order."""
    (batches,) = loaders(12, 2)
    passes = [samples(batches) for _ in range(3)]
    assert len({str(each) for each in passes}) == 3
    batches.sampler.set_epoch(1)
    assert samples(batches) == passes[1]
    next(iter(batches))
    assert sorted(samples(batches)) == list(range(12))
    (again,) = loaders(12, 2)
    (other,) = loaders(12, 2, seed=1)
    assert samples(again) == passes[0] != samples(other)


@pytest.mark.parametrize(
    ("size", "batch_size", "ranks", "drop_last"),
    [(10, 1, 3, False), (2, 4, 3, False), (7, 4, 2, True)],
)
def test_samples_that_cannot_be_dealt_are_refused(
    size: int, batch_size: int, ranks: int, drop_last: bool
) -> None:
    with pytest.raises(ConfigError, match=f"{size} samples .* {ranks} ranks"):
        loaders(size, batch_size, ranks, drop_last=drop_last)


def double(batch: list[int]) -> Tensor:
    return 2 * torch.tensor(batch)


def test_options_are_torchs() -> None:
    options = {"num_workers": 1, "prefetch_factor": 3, "collate_fn": double, "pin_memory": True}
    (batches,) = loaders(4, 2, shuffle=False, **options)
    assert [batch.tolist() for batch in batches] == [[0, 2], [4, 6]]
    with pytest.raises(ValueError, match="mutually exclusive"):
        loaders(4, 2, sampler=range(4))


# -- tokens ---------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """42 samples of 4 tokens; sample i begins with token 4i."""
    np.arange(42 * 4 + 1, dtype=np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path


def dataset_loaders(directory: Path, count: int, batch: int) -> list[DatasetLoader]:
    return [DatasetLoader(batch, 4, rank, count, directory, seed=5) for rank in range(count)]


def firsts(ranks: list[DatasetLoader]) -> list[int]:
    """The samples of one call on all ranks, by their first tokens."""
    batches = [one.next_batch() for one in ranks]
    assert all(torch.equal(x + 1, y) for x, y in batches)
    return [n for x, _ in batches for n in x[:, 0].tolist()]


def test_batches_of_one_call_are_disjoint_and_together_complete(directory: Path) -> None:
    ranks = dataset_loaders(directory, 3, 2)
    for _ in range(2):
        epoch = [n for _ in range(7) for n in firsts(ranks)]
        assert sorted(epoch) == list(range(0, 168, 4))
    batches = iter(DatasetLoader(40, 4, 0, 1, directory))
    assert [next(batches)[0].shape for _ in range(5)] == [(40, 4)] * 5


def test_another_number_of_processes_goes_on(directory: Path) -> None:
    undisturbed = dataset_loaders(directory, 1, 6)
    expected = [firsts(undisturbed) for _ in range(4)]
    before = dataset_loaders(directory, 2, 3)
    assert [firsts(before) for _ in range(2)] == expected[:2]
    after = dataset_loaders(directory, 3, 2)
    firsts(after)  # loading ends what a loader was doing
    for one in after:
        one.load_state_dict(before[0].state_dict())
    assert [firsts(after) for _ in range(2)] == expected[2:]
