"""A micro-batch: its two parts, what counts in it, and its way to the device."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradsync.data.batch_plan import MicroBatchSpan, StepSpan
from gradsync.data.loader import loader
from gradsync.data.micro_batch import Batch, MicroBatch, count_targets, make_micro_batch, move_to
from gradsync.errors import DataError
from gradsync.world import World

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")
Single = namedtuple("Single", "x")
X, Y = torch.arange(6.0).view(3, 2), torch.tensor([4, 5, 6])


@dataclass
class Encoding:
    """A batch as a collate function may return it."""

    x: Any


def micro_batch_of(batch: Any, num_samples: int = 3) -> MicroBatch:
    return make_micro_batch(
        batch, index=0, step=0, num_samples=num_samples, is_last=True, device=CPU
    )


def step_of(indices: list[int], **options: Any) -> Batch:
    parts = [MicroBatchSpan(index, index, 1) for index in indices]
    span = StepSpan(2, parts, everyone_has_some=False)
    return Batch(span, lambda: torch.zeros(2), device=CPU, **options)


def test_a_step_that_gives_fewer_micro_batches_than_it_has_is_an_error() -> None:
    """Sums without order, as in `bucketed`, would not notice: the mean would be another batch's."""
    step = step_of([0, 1], number=6)
    micro_batches = iter(step)
    next(micro_batches)
    step.drain()  # as where the next step is taken meanwhile
    with pytest.raises(DataError, match=r"^step 7 brought 1 of its 2 micro-batches on this rank"):
        next(micro_batches)


def test_a_data_set_of_tensors_has_inputs_only() -> None:
    """A row of a tensor is a sample: rows 0 and 1 of the batch are not inputs and targets."""
    samples = torch.arange(12.0).view(6, 2)
    options = {"global_batch_size": 3, "micro_batch_size": 3, "num_epochs": 1, "shuffle": False}
    micro_batch, _ = [
        micro_batch for step in loader(samples, World(), **options) for micro_batch in step
    ]
    assert micro_batch.inputs.tolist() == micro_batch.batch.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match=r"micro_batch\.targets: this batch is a Tensor"):
        _ = micro_batch.targets


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], (X, Y, "more"), Point(X, Y)])
def test_the_first_two_parts_are_inputs_and_targets(batch: Any) -> None:
    micro_batch = micro_batch_of(batch)
    assert micro_batch.inputs is X
    assert micro_batch.targets is Y


@pytest.mark.parametrize(
    "batch", [X, ["a", "b", "c"], (1, 2, 3), [], "text", Encoding(X), None, [X], (X,), Single(X)]
)
def test_what_has_no_second_part_has_inputs_only(batch: Any) -> None:
    micro_batch = micro_batch_of(batch)
    alone = isinstance(batch, (list, tuple)) and len(batch) == 1  # as `TensorDataset(x)` gives it
    assert micro_batch.inputs is (X if alone else micro_batch.batch)
    with pytest.raises(DataError, match=r"micro_batch\.targets: this batch is a"):
        _ = micro_batch.targets


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_a_dict_is_named_with_its_keys(kind: type, name: str) -> None:
    """A Hugging Face BatchEncoding is a UserDict."""
    micro_batch = micro_batch_of(kind({"input_ids": X, "labels": Y}))
    with pytest.raises(DataError, match=rf"micro_batch.{name}: .* \('input_ids', 'labels'\)"):
        getattr(micro_batch, name, None)  # a DataError is no AttributeError: nothing swallows it


# -- what counts -----------------------------------------------------------------------------------

MASKED = torch.tensor([[1, 2, -100], [3, 4, -100]])
COUNTS = {
    "a class for each sample": ((X, Y), 3),
    "masked": ([X, MASKED], 4),
    "masked, int32": ([X, MASKED.int()], 4),
    "multi-label": ((X, torch.ones(3, 5, dtype=torch.int64)), 15),
    "multi-label, bool": ((X, torch.zeros(3, 5, dtype=torch.bool)), 15),
    "multi-label, float": ((X, torch.ones(3, 5)), 3),
    "class 156 of a uint8 mask": ((X, torch.full((3, 2, 2), 156, dtype=torch.uint8)), 12),
    "probabilities": ((X, torch.ones(3, 10) / 10), 3),
    "values": ((X, X), 3),
    "complex values": ((X, X.to(torch.complex64)), 3),
    "one number": ((X, torch.tensor(7)), 3),
    "dict with labels": ({"input_ids": X, "labels": MASKED}, 4),
    "dict with a label for each sample": ({"x": X, "labels": Y}, 3),
    "dict with all labels masked": ({"labels": torch.full((3, 4), -100)}, 0),
    "user dict": (UserDict({"labels": torch.full((3, 4), 1)}), 12),
    "dict with float labels": ({"labels": torch.ones(3, 5)}, 3),
    "dict without labels": ({"x": torch.zeros(3)}, 3),
    "named tuple": (Point(X, MASKED), 4),
    "three parts": ((X, torch.ones(3, 7, dtype=torch.int64), Y), 3),
    "tensor": (torch.ones(3, 7, dtype=torch.int64), 3),
    "texts": (["a", "b"], 3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_as_a_target(name: str) -> None:
    batch, expected = COUNTS[name]
    assert count_targets(batch, 3) == expected


# -- to the device ---------------------------------------------------------------------------------


def test_every_tensor_of_a_batch_moves_and_the_shape_of_the_batch_stays() -> None:
    x = torch.zeros(2)
    moved = move_to({"a": [x, (x, "text")], "p": Point(x, 3)}, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == "text"
    assert type(moved["p"]) is Point
    assert moved["p"][0].device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "planned", "rows"),
    [
        (X, 4, 3),
        ([X, torch.ones(3)], 4, 3),  # float targets
        ((X, torch.ones(3, 1)), 8, 3),
        ({"x": X, "y": torch.ones(3), "names": ["a"], "scale": torch.tensor(2.0)}, 4, 3),
        ([X, torch.ones(3, dtype=torch.float64), torch.ones(3)], 4, 3),
        ([X[:0], torch.ones(0)], 4, 0),
        ([X[:1], torch.ones(1, 2)], 2, 1),
        # padded, or with a row more for each: not told apart
        ([X, torch.ones(3)], 2, 2),
        # not counted
        ({"tokens": torch.ones(7), "offsets": torch.ones(3)}, 4, 4),
        ([X, torch.ones(2, 3)], 4, 4),
        ([X, X, X, X], 4, 4),  # a list of samples
        ([(X, X), (X, X)], 4, 4),
        ("text", 4, 4),
        (None, 4, 4),
        (Encoding(X), 4, 4),
    ],
)
def test_rows_that_a_collate_function_left_out_do_not_count(
    batch: Any, planned: int, rows: int
) -> None:
    micro_batch = micro_batch_of(batch, planned)
    assert micro_batch.num_samples == rows
    assert micro_batch.num_targets == rows


def test_ignored_targets_of_the_rows_that_are_left_do_not_count_either() -> None:
    targets = torch.tensor([1, -100, 2])
    for batch in ([X, targets], {"x": X, "labels": targets}):
        micro_batch = micro_batch_of(batch, 4)
        assert (micro_batch.num_samples, micro_batch.num_targets) == (3, 2)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6, 8, 5),  # time first, as `pad_sequence` makes it
        (torch.zeros(6, 8, 5), torch.zeros(6, 8)),
        {"inputs": torch.zeros(6, 8, 5), "targets": torch.zeros(6, 8, 1)},
        [torch.zeros(3, size, size) for size in range(2, 10)],  # collate_fn=list
    ],
)
def test_what_has_fewer_rows_and_all_samples(batch: object) -> None:
    assert micro_batch_of(batch, 8).num_samples == 8


def test_a_second_pass_draws_for_each_micro_batch_on_its_own() -> None:
    """Whichever micro-batches the rank has, and not again what the first pass drew."""

    def drawn(indices: list[int]) -> list[list[float]]:
        step = step_of(indices, number=0, seed=7)
        taken, found = list(step), []
        for _ in range(3):
            for micro_batch in taken:
                found.append([micro_batch.index, float(torch.rand(()) + micro_batch.batch.sum())])
                found[-1][1] = float(torch.rand(()))
                micro_batch.backward_ended()
        return found

    with torch.random.fork_rng():
        both, first, second = drawn([0, 1]), drawn([0]), drawn([1])
    assert sorted(both) == sorted(first + second)
    assert len({value for _, value in both}) == 6


def test_labels_that_a_model_shifts_are_counted_without_the_first() -> None:
    labels = torch.tensor([[5, 1, -100, 2], [-100, -100, 3, -100]])
    found = micro_batch_of({"input_ids": labels, "labels": labels})
    assert (found.num_targets, found.num_shifted_targets) == (4, 3)
    for other in ({"labels": labels[:, 0]}, (labels, labels)):
        with pytest.raises(DataError, match=r"^micro_batch\.num_shifted_targets: this batch is a"):
            _ = micro_batch_of(other).num_shifted_targets
