"""A user's own script: dropout is the same on any number of ranks, and so is the order of data."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import gradsync as gs
from gradsync.errors import ConfigError
from gradsync.world import World
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
                sync.backward(loss_sum, leaf, reduction="sum")
            sync.step(optimizer)
        return gs.weights_sha256(model.named_parameters()), sync.mean_loss


def test_dropout_does_not_depend_on_the_number_of_ranks(pool: Any) -> None:
    (alone,) = pool.run(train_with_dropout, 1)
    assert pool.run(train_with_dropout, 2) == [alone, alone]


class Named(list[torch.Tensor]):
    """Its text, and that of its method, is another one in each process."""

    def __repr__(self) -> str:
        return str(os.getpid())

    def fingerprint(self) -> str:
        return ""


def take_steps(rank: int, world_size: int, store_path: str, case: str) -> str:
    """Error of a rank in steps where one of two has `case` otherwise."""
    other, sizes = rank == 1, {"global_batch_size": 8, "micro_batch_size": 2}
    with open_session(rank, world_size, store_path) as world:
        model = nn.Linear(1, 1)
        sync = gs.replicate(
            model, world, strategy="bucketed" if case == "own data" else "invariant"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.ones(1)] * (65 if case == "length" and other else 62)
        data = Named(data) if case == "method" else data
        if case == "content":
            numbers = torch.Generator().manual_seed(int(other))
            data = TensorDataset(torch.randn(62, 1, generator=numbers))
        seed = np.int64(case in ("seed", "own data") and other)
        among = World() if case == "own data" else world
        batches = gs.loader(data, among, seed=seed, num_epochs=1, **sizes)
        if case == "place" and other:
            next(each for each in batches if not each.drain())
        if case == "state" and other:
            batches.load_state_dict(batches.state_dict() | {"samples": 8})
        for step in batches:
            if case == "evaluation" and world.is_main:
                for each in gs.loader(data, world, shuffle=False, num_epochs=1, **sizes):
                    each.drain()
            for leaf in step:
                if not (case == "skipped" and other):
                    sync.backward(model(leaf.inputs).sum(), leaf, reduction="sum")
            try:
                sync.step(optimizer)
            except ConfigError as error:
                return str(error)
        return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("seed", "rank 1 list of 62, seed 1, shuffled, 8 by 2, sample 0, step 0"),
        ("length", "rank 1 list of 65, seed 0, shuffled, 8 by 2, sample 0, step 0"),
        ("place", "rank 1 list of 62, seed 0, shuffled, 8 by 2, sample 8, step 1"),
        ("state", "rank 1 list of 62, seed 0, shuffled, 8 by 2, sample 8, step 0"),
    ],
    ids=["seed", "length", "place", "state"],
)
def test_ranks_that_read_other_orders_are_refused(pool: Any, case: str, said: str) -> None:
    """Each would take its leaves of something else: samples come twice, others never."""
    for told in pool.run(take_steps, 2, case):
        first = "rank 0 list of 62, seed 0, shuffled, 8 by 2, sample 0, step 0"
        plain = re.sub(r" \(\w{8}\)", "", told)
        assert plain.startswith(f"gs.loader differs: {first}, {said};")
        assert "ranks share one order of one data set" in told


def test_ranks_that_made_up_their_own_data_are_refused(pool: Any) -> None:
    for told in pool.run(take_steps, 2, "content"):
        contents = re.findall(r"rank \d TensorDataset of 62 \((\w+)\), seed 0", told)
        assert len({*contents}) == 2
        assert "ranks share one order of one data set" in told


@pytest.mark.parametrize("case", ["", "evaluation", "skipped", "own data", "method"])
def test_ranks_that_read_one_order_are_not(pool: Any, case: str) -> None:
    """The last step, of six samples, has a leaf too few for equal shares."""
    assert pool.run(take_steps, 2, case) == ["", ""]
