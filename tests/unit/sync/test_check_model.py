"""How groups of ranks read, and how a model is described."""

from __future__ import annotations

import pytest
from torch import nn

from gradsync.sync.check_replicas import describe_model, name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([0, 2], "ranks 0,2"),
        ([0, 1], "ranks 0,1"),
        ([0, 1, 2, 3, 9], "ranks 0-3,9"),
        ([3, 5, 6, 8, 9, 10], "ranks 3,5,6,8-10"),
    ],
)
def test_ranks_read_shortly(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_a_model_is_described_with_ties_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert describe_model(model) == {
        "parameter '0.weight'": "[2, 2] torch.float32 trainable on cpu",
        "parameter '0.bias'": "[2] torch.float32 trainable on cpu",
        "parameter '1.weight'": (
            "[2, 2] torch.float32 trainable on cpu tied to parameter '0.weight'"
        ),
        "parameter '2.weight'": "[2] torch.float32 frozen on cpu",
        "parameter '2.bias'": "[2] torch.float32 frozen on cpu",
        "buffer '2.running_mean'": "[2] torch.float32 frozen on cpu",
        "buffer '2.running_var'": "[2] torch.float32 frozen on cpu",
        "buffer '2.num_batches_tracked'": "[] torch.int64 frozen on cpu",
    }
