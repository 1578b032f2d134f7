"""Models that ranks compare before they begin, and how a difference reads."""

from __future__ import annotations

import pytest
from torch import nn

from gradsync.sync.check_model import Entry, describe_model, first_difference, name_ranks


def entry(name: str, place: int = 0, text: str = "") -> Entry:
    """A trainable [2] float32 on the CPU, unless property `place` is said otherwise."""
    properties = ["[2] float32", "trainable", "not tied", "(device cpu)"]
    if text:
        properties[place] = text
    return [f"parameter {name!r}", *properties]


A, B, C = entry("a"), entry("b"), entry("c")


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        (
            [[A, B], [A, entry("b", 0, "[3] float32")], [A, B]],
            "parameter 'b' is [2] float32 on ranks 0,2 but [3] float32 on rank 1",
        ),
        (
            [[A], [entry("a", 1, "frozen")]],
            "parameter 'a' is [2] float32 trainable on rank 0 but [2] float32 frozen on rank 1",
        ),
        ([[A, B, C], [A, C]], "parameter 'b' exists on rank 0 but is missing on rank 1"),
        (
            [[A], [A, B], [A, B], [A, B]],
            "parameter 'b' is missing on rank 0 but exists on ranks 1-3",
        ),
        ([[A, B], [], [A, B]], "parameter 'a' exists on ranks 0,2 but is missing on rank 1"),
        (
            [[A, ["buffer 'b'", *B[1:]]], [A, B]],
            "buffer 'b' exists on rank 0 but is missing on rank 1",
        ),
        (
            [[A, B, C], [A, C, B]],
            "number 2 of the list is parameter 'b' on rank 0 but parameter 'c' on rank 1",
        ),
        ([[["sync", repr(name)]] for name in "ab"], "sync is 'a' on rank 0 but 'b' on rank 1"),
    ],
)
def test_the_first_difference_is_named(by_rank: list[list[Entry]], message: str) -> None:
    assert first_difference(by_rank) == message


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
    described = {key: list(properties) for key, *properties in describe_model(model)}
    assert list(described) == [
        *("parameter '0.weight'", "parameter '0.bias'", "parameter '1.weight'"),
        *("parameter '2.weight'", "parameter '2.bias'"),
        *("buffer '2.running_mean'", "buffer '2.running_var'", "buffer '2.num_batches_tracked'"),
    ]
    cpu = "(device cpu)"
    assert described["parameter '0.weight'"] == ["[2, 2] float32", "trainable", "not tied", cpu]
    tied = ["[2, 2] float32", "trainable", "tied to parameter '0.weight'", cpu]
    assert described["parameter '1.weight'"] == tied
    assert described["parameter '2.bias'"] == ["[2] float32", "frozen", "not tied", cpu]
    assert described["buffer '2.num_batches_tracked'"] == ["[] int64", "frozen", "not tied", cpu]
