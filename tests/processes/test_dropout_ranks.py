"""A user's own script: dropout is the same on any number of ranks, and so is the order of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradsync as gs
from gradsync.errors import ConfigError
from support.rank_session import open_session


def train_with_dropout(rank: int, world_size: int, store_path: str) -> tuple[str, float]:
    """The README's loop; the weights' hash and the last loss."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=generator), i % 4) for i in range(64)]
    with open_session(rank, world_size, store_path, seed=0) as world:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
        sync = gs.replicate(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in gs.loader(
            data, world, global_batch_size=16, micro_batch_size=4, num_epochs=1, seed=7
        ):
            for leaf in step:
                loss_sum = F.cross_entropy(model(leaf.inputs), leaf.targets, reduction="sum")
                sync.backward(loss_sum, leaf=leaf)
            sync.step(optimizer)
        return gs.weights_sha256(model.named_parameters()), sync.mean_loss


def test_dropout_does_not_depend_on_the_number_of_ranks(pool: Any) -> None:
    (alone,) = pool.run(train_with_dropout, 1)
    assert pool.run(train_with_dropout, 2) == [alone, alone]


def read_samples(rank: int, world_size: int, store_path: str, case: str) -> str:
    """What a rank is told whose loader is not the other's: one of two has `case` otherwise."""
    with open_session(rank, world_size, store_path) as world:
        sizes = {"micro_batch_size": 2 + 2 * (rank if case == "micro_batch_size" else 0)}
        data = list(range(64 + (rank if case == "dataset" else 0)))
        seed = rank if case == "seed" else 0
        batches = gs.loader(data, world, global_batch_size=8, seed=seed, num_epochs=2, **sizes)
        if case == "samples" and rank:
            next(iter(batches))
        if case == "line" and rank:
            batches = gs.loader(data, world, global_batch_size=8, micro_batch_size=2, num_epochs=2)
        try:
            for _ in range(2):
                for step in batches:
                    step.drain()
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("case", ["seed", "dataset", "micro_batch_size", "samples"])
def test_ranks_that_read_other_orders_are_refused(pool: Any, case: str) -> None:
    """Each would take its leaves of something else: samples come twice, others never."""
    told = max(pool.run(read_samples, 2, case))
    assert told.startswith("the loader at test_dropout_ranks.py:")
    assert f"in read_samples has {case}=" in told
    assert " on rank 0" in told
    assert " on rank 1" in told


@pytest.mark.parametrize("case", ["", "line"])
def test_ranks_that_read_one_order_are_not(pool: Any, case: str) -> None:
    """Whatever line made the loader, as often as it is read."""
    assert pool.run(read_samples, 2, case) == ["", ""]
