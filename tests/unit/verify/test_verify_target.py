"""The user's own problem: alike everywhere, enough of it, and mistakes in it said in a line."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from gradsync.comm.groups import SingleCommunicator
from gradsync.commands.verify.problem import build_problem, check_target, find_factory
from gradsync.commands.verify.record import digest
from gradsync.commands.verify.run import Task, train_traced
from gradsync.commands.verify.settings import VerifySettings
from gradsync.errors import ConfigError

SETTINGS = VerifySettings(num_steps=2)
INPUTS = torch.arange(320.0).reshape(40, 8).sin()
TARGETS = torch.arange(40) % 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def pairs(count: int = 40) -> TensorDataset:
    return TensorDataset(INPUTS[:count], TARGETS[:count])


def called(name: str, *, dtype: str = "fp32", **changes: Any) -> Task:
    settings = replace(SETTINGS, target=f"unit.verify.test_verify_target:{name}", **changes)
    return Task(strategy="naive", model="target", dtype=dtype, settings=settings)


# --- alike on every call ---------------------------------------------------------------------

DRAWS = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(5)
random.seed(5)
np.random.seed(5)
X = torch.randn(40, 3)


def factory():
    scale = random.random() + np.random.rand()
    model = nn.Linear(3, 2)
    nn.init.normal_(model.weight, std=scale)
    return model, TensorDataset(X, X[:, :2]), lambda o, t: (o - t).square().sum()
"""


def test_a_module_that_seeds_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call imports the module and the second does not: both give the same weights."""
    (tmp_path / "drawing_target.py").write_text(DRAWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    settings = replace(SETTINGS, target="drawing_target:factory")
    first, second = (build_problem("target", settings).model.weight for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# --- enough data -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["normed", "single"])
def test_every_step_is_run_whatever_the_size_of_the_data(name: str) -> None:
    """BatchNorm1d cannot train on a single sample, so the short micro-batch has two."""
    task = called(name, num_steps=3)
    check_target(task.settings)
    trace = train_traced(task, SingleCommunicator())
    assert [len(step.micro_batches) for step in trace.steps] == [5, 5, 2]
    assert len(trace.steps[-1].micro_batches[-1]["samples"]) == 2


# --- what is wrong is said in a line -----------------------------------------------------------


class Samples(Dataset[Any]):
    """Forty samples, each made by a function of its index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Odd(nn.Module):
    """A classifier whose output `change(model, input, output)` makes."""

    def __init__(self, change: Callable[[Any, Any, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.change = net(), change

    def forward(self, x: Any) -> Any:
        return self.change(self, x, self.net(x["x"] + x["more"][0] if isinstance(x, dict) else x))


def two_lines(*_: Any) -> Any:
    raise ValueError("no such\nthing")


KEPT = net()


def given(model: Any = None, data: Any = None, loss_sum: Any = summed) -> Any:
    """A right problem but for what is given."""
    return model or net(), pairs() if data is None else data, loss_sum


def made(sample: Callable[[int], Any], **others: Any) -> Any:
    return given(data=Samples(sample), **others)


LINE = "(test_verify_target.py:"

# Name: its parts, and what is said of it; "" where it is left alone.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no_model": (lambda: given("net"), "TypeError: 'net' is no torch.nn.Module"),
    "frozen": (lambda: given(net().requires_grad_(False)), "does not require grad"),
    "same_model": (lambda: given(KEPT), "must build a new model each time it is called"),
    "ragged": (
        lambda: made(lambda i: (INPUTS[i, : 8 - i % 2], TARGETS[i])),
        "RuntimeError: stack expects each tensor to be equal size",
    ),
    "mean_loss": (
        lambda: given(nn.Sequential(net(), nn.Dropout(0.5)), loss_sum=F.cross_entropy),
        "loss scaling: loss_sum is a mean; use reduction='sum'",
    ),
    "raises": (two_lines, f"ValueError: no such thing {LINE}"),
    "leaves": (sys.exit, "SystemExit: "),
    "plain": (given, ""),
    "normed": (
        lambda: given(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))),
        "",
    ),
    "single": (lambda: given(data=pairs(1)), ""),
    "contrastive": (
        lambda: given(loss_sum=lambda o, t: -torch.log_softmax(o @ o.T, 1).diagonal().sum()),
        "",
    ),
    # The loader seeds torch's generator by the micro-batch before it reads.
    "keyed": (lambda: made(lambda i: (INPUTS[i] + torch.randn(8), TARGETS[i])), ""),
    # As a model may that gathers features.
    "needs_group": (
        lambda: given(Odd(lambda _, x, output: output * torch.distributed.get_world_size())),
        "",
    ),
    # Something else in evaluation mode, as detectors give.
    "trains_only": (
        lambda: given(Odd(lambda model, x, output: output if model.training else [{"boxes": x}])),
        "",
    ),
    # Takes a dict with lists in it, and gives one.
    "named": (
        lambda: made(
            lambda i: ({"x": INPUTS[i], "more": [INPUTS[i]], "id": str(i)}, TARGETS[i]),
            model=Odd(lambda _, x, output: {"logits": output}),
            loss_sum=lambda o, t: summed(o["logits"], t),
        ),
        "",
    ),
}


def __getattr__(name: str) -> Callable[[], Any]:
    """Each entry of `CASES`, where a target's name is looked up in this module."""
    if name not in CASES:
        raise AttributeError(name)
    return CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_part_is_named_and_a_right_target_left_alone(name: str) -> None:
    state, message = torch.get_rng_state(), CASES[name][1]
    if message:
        with pytest.raises(ConfigError) as raised:
            check_target(called(name).settings)
        text = str(raised.value)
        assert text.startswith(f"--target unit.verify.test_verify_target:{name}: ")
        assert message in text
        assert "\n" not in text
    else:
        check_target(called(name).settings)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "expected pkg.module:factory"),
        ("no_such_module:factory", "No module named 'no_such_module'$"),
        ("unit.verify.test_verify_target:missing", "AttributeError: missing"),
    ],
)
def test_a_target_that_cannot_be_found(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_factory(target)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def factory(:\n", "SyntaxError: invalid syntax"),
        ("\n1/0\n", "ZeroDivisionError: division by zero (wrong_target.py:2"),
        ("raise SystemExit(0)\n", "SystemExit: 0 (wrong_target.py:1"),
    ],
)
def test_a_module_that_cannot_be_imported(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_target.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(ConfigError) as raised:
        find_factory("wrong_target:factory")
    text = str(raised.value)
    assert text.startswith("--target wrong_target:factory: ")
    assert message in text
    assert "wrong_target.py" in text
    assert "\n" not in text


def test_doubles_reach_into_dicts() -> None:
    trace = train_traced(called("named", dtype="fp64"), SingleCommunicator())
    weights = [step.after.weights for step in trace.steps]
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float64}
    assert len({digest(each["net.0.weight"]) for each in weights}) == 2
