"""The problems that are trained, the seams between checkpoints, and the one-rank reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.groups import SingleCommunicator
from gradsync.commands.verify.compare import Difference
from gradsync.commands.verify.matrix import run_cell
from gradsync.commands.verify.problem import build_problem
from gradsync.commands.verify.record import sample_digests
from gradsync.commands.verify.reference import Reference
from gradsync.commands.verify.run import Task, disturb, read, save, train_traced
from gradsync.commands.verify.settings import Cell, VerifySettings

SETTINGS = VerifySettings(num_steps=2)


def task(model: str, strategy: str = "naive", dtype: str = "fp32", num_steps: int = 2) -> Task:
    settings = VerifySettings(num_steps=num_steps)
    return Task(strategy=strategy, model=model, dtype=dtype, settings=settings)


def test_the_problems_have_what_goes_wrong_in_practice() -> None:
    mlp = build_problem("mlp", SETTINGS)
    names = [name for name, _ in mlp.model.named_parameters(remove_duplicate=False)]
    assert len(names) > len(list(mlp.model.parameters()))  # tied
    assert any(not parameter.requires_grad for parameter in mlp.model.parameters())
    reference = Reference(task("mlp"), 1)
    first, last = (reference.results(step, reference.weights(), {}) for step in (0, 1))
    assert len({"branch.weight" in each.gradient for each in first}) == 2  # used by some
    assert len({each.weight for each in first}) > 1  # unequal weights
    used = [["rare.weight" in each.gradient for each in step] for step in (first, last)]
    assert used == [[False] * 5, [False, True]]  # by none, then by one
    assert any(isinstance(m, nn.BatchNorm2d) for m in build_problem("conv", SETTINGS).model)


def test_strategies_change_micro_batches_but_not_the_data() -> None:
    equal = task("mlp", "fsdp").settings_for(3)
    assert (equal.num_micro_batches, equal.num_epochs) == (6, None)
    assert equal.dataset_size == SETTINGS.dataset_size
    assert task("mlp").settings_for(3) == SETTINGS


def test_samples_are_known_by_their_contents() -> None:
    inputs, targets = torch.randn(3, 2), torch.tensor([0, 1, -100])
    first = sample_digests((inputs, targets), 3)
    assert len(set(first)) == 3
    assert sample_digests([inputs[1:], targets[1:]], 2) == first[1:]
    targets[0] = 1
    assert sample_digests((inputs, targets), 3)[0] != first[0]
    named = {"x": inputs, "mask": torch.ones(7)}
    assert len(set(sample_digests({"y": named}, 3))) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_above_zero_start_from_other_weights(rank: int) -> None:
    """That is what makes a start that is not shared visible."""
    problem, untouched = build_problem("conv", SETTINGS), build_problem("conv", SETTINGS)
    disturb(problem.model, rank)
    expected = untouched.model.state_dict()
    for name, tensor in problem.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name] + rank * tensor.is_floating_point())


def test_the_reference_is_plain_training() -> None:
    """Sums over micro-batches and one whole batch agree; its record follows its own."""
    reference = Reference(task("gpt", dtype="fp64"), 1)
    start = reference.weights()
    trace = reference.train()
    assert reference.traces[0] == trace.steps[0].micro_batches
    results = reference.results(0, start, {})
    weight = sum(result.weight for result in results)
    total: Tensor = sum(result.gradient["norm.weight"] for result in results) / weight
    clipped, norm = trace.steps[0].gradient["norm.weight"], trace.steps[0].norm
    assert clipped is not None
    assert norm is not None
    torch.testing.assert_close(clipped * max(norm / 0.5, 1.0), total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", ["naive", "invariant"])
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path, strategy: str) -> None:
    one, asked = SingleCommunicator(), task("mlp", strategy, num_steps=4)
    whole = train_traced(asked, one)
    save(tmp_path, strategy, whole, 2)
    saved = read(tmp_path, one)
    rest = train_traced(replace(asked, saved=saved), one)
    assert [step.number for step in rest.steps] == [2, 3]
    found = Difference()
    for a, b in zip(rest.steps, whole.steps[2:], strict=True):
        for part in ("weights", "buffers", "optimizer"):
            found.include(a.number, getattr(a.after, part), getattr(b.after, part))
        assert (a.micro_batches, a.loss) == (b.micro_batches, b.loss)
    assert found.bitwise


def not_finite() -> Any:
    data = TensorDataset(torch.ones(40, 8), torch.arange(40) % 4)
    return nn.Linear(8, 4), data, lambda output, _: (output * float("nan")).sum()


@pytest.mark.parametrize("strategy", ["naive", "local_sgd"])
def test_what_no_strategy_can_help_is_called_that(strategy: str) -> None:
    settings = replace(SETTINGS, target="unit.verify.test_verify_problem:not_finite")
    cell = Cell(strategy=strategy, world_size=1, model="target", dtype="fp32")
    result, _ = run_cell(cell, settings, SingleCommunicator())
    assert (result.status, result.cause) == ("failed", "unknown")
    assert "a number is not finite on one rank either" in result.sentence
