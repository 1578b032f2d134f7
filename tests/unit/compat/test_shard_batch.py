"""Cutting a batch into ranks' parts, by value."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gradsync.compat.course import shard_batch
from gradsync.errors import ConfigError, DataError


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_parts_are_the_batch(size: int, world_size: int) -> None:
    batch = torch.arange(2 * size).view(size, 2)
    parts = [shard_batch(batch, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), batch)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_structure_stays() -> None:
    x = torch.arange(5)
    batch = {"pair": Pair(x, x + 10), "list": [x, (x,)], "seed": 3, "scale": torch.tensor(2.0)}
    part = shard_batch(batch, 1, 2)
    assert part["pair"].targets.tolist() == [12, 13, 14]
    assert isinstance(part["pair"], Pair)
    assert part["list"][0].tolist() == part["list"][1][0].tolist() == [2, 3, 4]
    assert (part["seed"], part["scale"].item()) == (3, 2.0)
    assert part["list"][0].data_ptr() == x[2:].data_ptr()  # a view, no copy


def test_bad_requests() -> None:
    with pytest.raises(ConfigError, match=r"rank must be in 0\.\.1, got 2"):
        shard_batch(torch.zeros(4), 2, 2)
    with pytest.raises(DataError, match=r"different lengths: \[4, 3\]"):
        shard_batch((torch.zeros(4), torch.zeros(3)), 0, 2)
    with pytest.raises(DataError, match="a batch to shard needs a tensor; got dict"):
        shard_batch({"a": 1}, 0, 2)
