"""Sums of single numbers: the same bits in any order and grouping, and close to the exact ones."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.comm.groups import SingleCommunicator
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import RunError
from gradsync.sync.step_metadata import (
    NUM_BINS,
    LossSum,
    StepMetadata,
    agree_on_metadata,
    from_bins,
    mark_of,
    to_bins,
)

NUMBERS = st.lists(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e60, max_value=1e60),
    min_size=1,
    max_size=30,
)


def bins_of(numbers: list[float]) -> torch.Tensor:
    return to_bins(torch.tensor(numbers, dtype=torch.float64))


@given(NUMBERS, st.integers(0, 29), st.randoms(use_true_random=False))
def test_neither_order_nor_grouping_shows(
    numbers: list[float], first: int, rng: random.Random
) -> None:
    whole = bins_of(numbers)
    assert whole.shape == (NUM_BINS,)
    shuffled = numbers.copy()
    rng.shuffle(shuffled)
    parts = bins_of(shuffled[:first]) + bins_of(shuffled[first:])
    assert torch.equal(parts, whole)
    assert from_bins(parts.tolist()) == from_bins(whole.tolist())


@given(NUMBERS)
def test_the_sum_is_rounded_once(numbers: list[float]) -> None:
    exact = sum(Fraction(number) for number in numbers)
    dropped = Fraction(len(numbers), 2**220)
    error = abs(Fraction(from_bins(bins_of(numbers).tolist())) - exact)
    assert error <= abs(exact) / 2**53 + 2 * dropped


@given(st.lists(st.floats(width=32, min_value=2.0**-40, max_value=2.0**40), max_size=30))
def test_ordinary_losses_add_exactly(numbers: list[float]) -> None:
    assert from_bins(bins_of(numbers).tolist()) == math.fsum(numbers)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 3.0], -math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, -math.inf], math.nan),
        ([1e300, 1.0], 1e300),
        ([5e-324, 1.0], 1.0),
        ([], 0.0),
    ],
)
def test_numbers_outside(numbers: list[float], expected: float) -> None:
    found = from_bins(bins_of(numbers).tolist())
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_loss_that_is_changed_later_was_added_as_it_was() -> None:
    sums = LossSum(torch.device("cpu"))
    loss = torch.tensor(3.0, dtype=torch.float64)
    sums.add(loss, 0.1)
    loss.mul_(2)
    sums.add(loss, 0.2)
    total, weight = sums.over_ranks(SingleCommunicator(), sums.message())
    assert float(total) == 9.0
    assert weight == sums.weight == math.fsum([0.1, 0.2])


def test_a_rank_that_hears_itself_alone_says_so() -> None:
    """Else it would go on with its own loss, and step where the others do not."""
    comm, mine = SingleCommunicator(), StepMetadata(used=[True], loss=[2.0], marks={"model": 0})
    assert agree_on_metadata(comm, mine).loss == [2.0]
    comm.world_size = 3  # but its sum is over itself
    with pytest.raises(RunError, match=r"rank\(s\) 0 something else \(only its own numbers"):
        agree_on_metadata(comm, mine)


class Together(SingleCommunicator):
    """Three ranks, whose messages are known."""

    def __init__(self, messages: list[torch.Tensor]) -> None:
        super().__init__()
        self.world_size, self.messages = 3, messages

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        self.messages.append(tensor.clone())
        tensor.copy_(sum(self.messages[-3:]))
        return super().all_reduce(tensor)


@pytest.mark.parametrize(
    ("texts", "differ"),
    [("aaa", False), ("aab", True), ("abb", True), ("a-a", False), ("a-b", True), ("---", False)],
)
def test_marks_differ_where_those_who_have_one_differ(texts: str, differ: bool) -> None:
    messages: list[torch.Tensor] = []
    for text in texts:
        mark = None if text == "-" else mark_of(text.encode())
        mine = StepMetadata(used=[], marks={"model": 2**39 + 7, "data": mark})
        with nullcontext() if len(messages) == 2 else pytest.raises(RunError):
            found = agree_on_metadata(Together(messages), mine)
    assert found.unlike == ({"data"} if differ else frozenset())


def leaf_from(order: str, step: int, index: int) -> MicroBatch:
    return MicroBatch(
        **{"index": index, "step": step, "batch": None, "num_samples": 1, "num_targets": 1},
        **{"is_last": False, "order": order, "num_micro_batches": 4},
    )


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((("a", 0), ("a", 1), ("a", 2), ("a", 3)), False),
        ((("a", 0), ("a", 1), ("a", 1), ("a", 2)), True),  # two losses of one leaf
        ((("a", 3),), True),
        ((), False),  # nobody knows
        ((("a", 0), ("b", 0)), False),  # several loaders
        ((("", 0),), False),  # ranks that may have data of their own
        ((("a", 0), ("", 1)), False),  # some without a micro-batch
    ],
)
def test_leaves_that_nobody_was_given_are_counted(
    given: tuple[tuple[str, int], ...], missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sums = LossSum(torch.device("cpu"))
    for order, index in given:
        sums.add(torch.tensor(1.0), 1.0, leaf_from(order, 0, index))
    for _ in range(2):
        sums.warn_of_data(sums.source()[1])
    found = [text for text in caplog.messages if "came from gs.loader" in text]
    assert len(found) == missing
    sums.clear()
    assert sums.source() == ("", 0.0)


def test_the_first_steps_data_coming_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sums = LossSum(torch.device("cpu"))
    said = []
    for step in (0, 1, 0, 1, 0):  # two more loaders
        sums.add(torch.tensor(1.0), 1.0, leaf_from("a", step, 0))
        sums.add(torch.tensor(1.0), 1.0, leaf_from("a", step, 1))  # of the same step
        sums.warn_of_data(0)
        sums.clear()
        said.append(len(caplog.messages))
    assert said == [0, 0, 1, 1, 1]
    assert caplog.messages[0].startswith("this step has the samples of the first one again")
