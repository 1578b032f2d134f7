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
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gradsync.comm.single import SingleCommunicator
from gradsync.errors import ConfigError
from gradsync.verify.plan import Settings
from gradsync.verify.problem import build_problem
from gradsync.verify.record import digest
from gradsync.verify.run import Task, train_traced
from gradsync.verify.target import check_target, find_factory

SETTINGS = Settings(num_steps=2)
INPUTS = torch.arange(320.0).reshape(40, 8).sin()
TARGETS = torch.arange(40) % 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def pairs(count: int = 40) -> TensorDataset:
    return TensorDataset(INPUTS[:count], TARGETS[:count])


def called(name: str, *, strategy: str = "naive", dtype: str = "fp32", **changes: Any) -> Task:
    settings = replace(SETTINGS, target=f"unit.test_verify_target:{name}", **changes)
    return Task(strategy=strategy, model="target", dtype=dtype, settings=settings)


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
    """BatchNorm1d cannot train on a single sample, so the short leaf has two."""
    task = called(name, num_steps=3)
    check_target(task)
    trace = train_traced(task, SingleCommunicator())
    assert [len(step.leaves) for step in trace.steps] == [5, 5, 2]
    assert len(trace.steps[-1].leaves[-1]["samples"]) == 2


# --- what is wrong is said in a line -----------------------------------------------------------


class Samples(Dataset[Any]):
    """Forty samples, each made by a function of its index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Stream(IterableDataset[Any]):
    """Has no length and no places."""

    def __iter__(self) -> Any:
        return iter(zip(INPUTS, TARGETS, strict=True))


class Complex(nn.Module):
    """Trains complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.cfloat) @ self.w).abs()


class Odd(nn.Module):
    """A classifier whose output `change(model, input, output)` makes."""

    def __init__(self, change: Callable[[Any, Any, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.change, self.scale = net(), change, nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.change(self, x, self.net(x["x"] + x["more"][0] if isinstance(x, dict) else x))


def forward_makes(name: str) -> Odd:
    """Its forward makes, or replaces, a parameter."""

    def change(model: Any, _: Any, output: Tensor) -> Tensor:
        setattr(model, name, nn.Parameter(torch.ones(4)))
        return output * getattr(model, name) * model.scale

    return Odd(change)


def two_lines(*_: Any) -> Any:
    raise ValueError("no such\nthing")


KEPT = net()


def raises() -> Any:
    raise RuntimeError("my factory\nis broken")


def leaves() -> Any:
    raise SystemExit(0)


FACTORIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: (net(), pairs(), summed),
    "normed": lambda: (
        nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
        pairs(),
        summed,
    ),
    "few": lambda: (net(), pairs(10), summed),
    "single": lambda: (net(), pairs(1), summed),
    "nothing": lambda: (net(), pairs(0), summed),
    "no_tuple": lambda: 3,
    "two": lambda: (net(), pairs()),
    "no_model": lambda: ("net", pairs(), summed),
    "no_loss": lambda: (net(), pairs(), 5),
    "frozen": lambda: (net().requires_grad_(False), pairs(), summed),
    "lazy": lambda: (nn.Sequential(nn.LazyLinear(4)), pairs(), summed),
    "complex_weights": lambda: (Complex(), pairs(), summed),
    "late": lambda: (forward_makes("shift"), pairs(), summed),
    "replaced": lambda: (forward_makes("scale"), pairs(), summed),
    "same_model": lambda: (KEPT, pairs(), summed),
    "stream": lambda: (net(), Stream(), summed),
    "dicts": lambda: (net(), Samples(lambda i: {"x": INPUTS[i], "y": TARGETS[i]}), summed),
    "triples": lambda: (net(), Samples(lambda i: (INPUTS[i], TARGETS[i], 1.0)), summed),
    "ragged": lambda: (net(), Samples(lambda i: (INPUTS[i, : 8 - i % 2], TARGETS[i])), summed),
    "augmented": lambda: (
        net(),
        Samples(lambda i: (INPUTS[i] + np.random.rand(), TARGETS[i])),
        summed,
    ),
    "unreadable": lambda: (net(), Samples(lambda i: (INPUTS[i], [1, 2][i + 7])), summed),
    "vector_loss": lambda: (net(), pairs(), lambda o, t: F.cross_entropy(o, t, reduction="none")),
    "one_loss": lambda: (net(), pairs(), lambda o, t: summed(o, t).reshape(1)),
    "float_loss": lambda: (net(), pairs(), lambda o, t: summed(o, t).item()),
    "cut_loss": lambda: (net(), pairs(), lambda o, t: summed(o, t).detach()),
    "mean_loss": lambda: (net(), pairs(), F.cross_entropy),
    "noisy_mean": lambda: (nn.Sequential(net(), nn.Dropout(0.5)), pairs(), F.cross_entropy),
    "broken": lambda: (Odd(two_lines), pairs(), summed),
    "contrastive": lambda: (
        net(),
        pairs(),
        lambda o, t: -torch.log_softmax(o @ o.T, 1).diagonal().sum(),
    ),
    # The loader seeds torch's generator by the leaf before it reads.
    "keyed": lambda: (net(), Samples(lambda i: (INPUTS[i] + torch.randn(8), TARGETS[i])), summed),
    # As a model may that gathers features.
    "needs_group": lambda: (
        Odd(lambda _, x, output: output * torch.distributed.get_world_size()),
        pairs(),
        summed,
    ),
    # Something else in evaluation mode, as detectors give.
    "trains_only": lambda: (
        Odd(lambda model, x, output: output if model.training else [{"boxes": x}]),
        pairs(),
        summed,
    ),
    # Takes a dict with lists in it, and gives one.
    "named": lambda: (
        Odd(lambda _, x, output: {"logits": output}),
        Samples(lambda i: ({"x": INPUTS[i], "more": [INPUTS[i]], "id": str(i)}, TARGETS[i])),
        lambda o, t: summed(o["logits"], t),
    ),
    "tiny_loss": lambda: (net(), pairs(), lambda o, t: 1e-38 * summed(o, t)),
    "all_ignored": lambda: (net(), TensorDataset(INPUTS, torch.full((40,), -100)), summed),
}


def __getattr__(name: str) -> Callable[[], Any]:
    """Each entry of `FACTORIES`, where a target's name is looked up in this module."""
    if name not in FACTORIES:
        raise AttributeError(name)
    return FACTORIES[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_tuple", "must return (model, data set, loss_sum), got int"),
        ("two", "must return (model, data set, loss_sum), got a tuple of 2"),
        ("no_model", "the model must be a torch.nn.Module, got str"),
        ("no_loss", "loss_sum must be a function, got int"),
        ("frozen", "no parameter of the model is trained"),
        ("lazy", "'0.weight' has no shape yet: run a batch through the model in the factory"),
        ("complex_weights", "'w' is complex64; verify knows"),
        ("late", "the forward makes parameter 'shift', which no optimizer knows: make it in"),
        ("replaced", "the forward replaces parameter 'scale', which no optimizer knows"),
        ("same_model", "must build a new model each time it is called"),
        ("stream", "map-style, with a length and samples by index; got Stream"),
        ("nothing", "the data set has no samples"),
        ("dicts", "a sample must be a pair (input, target), got dict with 'x', 'y'"),
        ("triples", "a sample must be a pair (input, target), got a tuple of 3"),
        ("ragged", "samples cannot be collated: RuntimeError: "),
        ("augmented", "gives another sample each time it is read; seed the augmentation by index"),
        ("unreadable", "sample 0 cannot be read: IndexError: list index out of range (test_"),
        ("vector_loss", "loss_sum must return a single number (shape []), got shape [3]"),
        ("one_loss", "loss_sum must return a single number (shape []), got shape [1]"),
        ("float_loss", "loss_sum must return a tensor, got float"),
        ("cut_loss", "has no gradient"),
        ("mean_loss", "loss scaling: loss_sum is a mean; use reduction='sum'"),
        ("noisy_mean", "loss scaling: loss_sum is a mean; use reduction='sum'"),
        ("broken", "a step on one leaf raised ValueError: no such thing (test_verify_target.py:"),
        ("raises", "the factory raised RuntimeError: my factory is broken (test_verify_target.py:"),
        ("leaves", "the factory raised SystemExit: 0 (test_verify_target.py:"),
    ],
)
def test_a_wrong_part_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_target(called(name))
    text = str(raised.value)
    assert text.startswith(f"--target unit.test_verify_target:{name}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "expected pkg.module:factory"),
        ("no_such_module:factory", "No module named 'no_such_module'$"),
        ("unit.test_verify_target:missing", "has no 'missing'"),
        ("unit.test_verify_target:SETTINGS", "is not callable"),
    ],
)
def test_a_target_that_cannot_be_found(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_factory(target)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def factory(:\n", "SyntaxError: invalid syntax"),
        ("from torch import nothing_like_this\n", "ImportError: cannot import name"),
        ("\n1/0\n", "ZeroDivisionError: division by zero (wrong_target.py:2"),
        ("raise SystemExit(0)\n", "SystemExit: 0 (wrong_target.py:1"),
        ("import no_such_thing_at_all\n", "No module named 'no_such_thing_at_all'"),
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
    assert "wrong_target.py:" in text
    assert "\n" not in text


def test_a_parameter_that_a_later_forward_makes() -> None:
    """One that only the ranks' forwards make, or some leaves', is not seen in the trial."""
    with pytest.raises(ConfigError, match="a forward made parameter 'shift', which no optimizer"):
        train_traced(called("late", strategy="bucketed"), SingleCommunicator())


def test_more_samples_than_there_are() -> None:
    with pytest.raises(ConfigError, match="--num-samples 41, but the data set has 40"):
        check_target(called("plain", num_samples=41))
    check_target(called("plain", num_samples=40))


# --- and what is right is left alone -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "contrastive",
        "keyed",
        "needs_group",
        "trains_only",
        "tiny_loss",
        "all_ignored",
        "named",
    ],
)
def test_a_right_target_is_left_alone(name: str) -> None:
    state = torch.get_rng_state()
    check_target(called(name))
    assert torch.equal(state, torch.get_rng_state())


def test_doubles_reach_into_dicts() -> None:
    trace = train_traced(called("named", dtype="fp64"), SingleCommunicator())
    weights = [step.after.weights for step in trace.steps]
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float64}
    assert len({digest(each["net.0.weight"]) for each in weights}) == 2
