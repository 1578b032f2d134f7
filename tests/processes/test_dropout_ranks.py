"""A user's own script whose model has dropout: the same weights on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradsync as gs
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
