"""A forward that cannot be repeated, or is not finite, is called that and nothing else."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.groups import communicator
from gradsync.verify.cell import Setting, run_cell
from gradsync.verify.plan import Cell, Settings
from support.rank_session import open_session

SETTINGS = Settings(num_steps=2)


class Net(nn.Module):
    """A small classifier with room for a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ByRank(Net):
    """Ranks compute different things."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 + torch.distributed.get_rank())


class ByNumpy(Net):
    """Draws from a generator that nobody seeds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1 + np.random.rand()))


class ByPython(Net):
    """The same, while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1 + random.random() * self.training))


class ByMemory(Net):
    """Keeps a running mean where nobody sees it."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * float(x.mean())
        return self.net(x - self.seen)


class NotFinite(Net):
    """Divides by nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * float("nan")


def _target(model: nn.Module, scale: float = 1.0) -> Any:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))

    def loss_sum(output: Tensor, target: Tensor) -> Tensor:
        return scale * F.cross_entropy(output, target, reduction="sum")

    return model, TensorDataset(x, torch.arange(40) % 4), loss_sum


def right() -> Any:
    return _target(Net())


def by_rank() -> Any:
    return _target(ByRank())


def by_numpy() -> Any:
    return _target(ByNumpy())


def by_python() -> Any:
    return _target(ByPython())


def by_memory() -> Any:
    return _target(ByMemory())


def not_finite() -> Any:
    return _target(NotFinite())


def too_large() -> Any:
    return _target(Net(), 1e30)


WRONG = [
    ("by_rank", "unknown", "rank 1: the forward is not reproducible", "depends on the rank"),
    ("by_numpy", "dropout/RNG", "the forward is not reproducible", "numpy's or Python's random"),
    ("by_python", "dropout/RNG", "the forward is not reproducible", "numpy's or Python's random"),
    ("by_memory", "unknown", "the forward is not reproducible", "kept between forwards"),
    ("not_finite", "unknown", "not finite on one rank either", "loss"),
    ("too_large", "unknown", "not finite on one rank either", "gradient norm"),
]


def _verify(
    rank: int, world_size: int, store_path: str, names: list[str]
) -> list[list[dict[str, Any]]]:
    found = []
    with open_session(rank, world_size, store_path) as world:
        for name in names:
            setting = Setting(
                settings=replace(SETTINGS, target=f"processes.test_verify_forward:{name}"),
                comm=communicator(world),
            )
            cells = [
                Cell(strategy=strategy, world_size=world_size, model="target", dtype="fp32")
                for strategy in ("naive", "local_sgd")
            ]
            found.append([asdict(run_cell(cell, setting)[0]) for cell in cells])
    return found


@pytest.fixture(scope="module")
def results(pool: Any) -> dict[str, list[dict[str, Any]]]:
    names = ["right", *(entry[0] for entry in WRONG)]
    return dict(zip(names, pool.run(_verify, 2, names)[0], strict=True))


@pytest.mark.parametrize(("name", "cause", "what", "why"), WRONG)
def test_what_no_strategy_can_help(
    results: dict[str, list[dict[str, Any]]], name: str, cause: str, what: str, why: str
) -> None:
    synchronised, local = results[name]
    assert synchronised["status"] == "failed"
    assert synchronised["cause"] == cause, synchronised["sentence"]
    assert what in synchronised["sentence"]
    assert why in synchronised["sentence"]
    if name == "by_rank":  # each rank is held to its own forward: nothing to be seen
        assert local["status"] == "passed"
    else:
        assert (local["status"], local["cause"]) == ("failed", cause), local["sentence"]


def test_a_right_forward_is_left_alone(results: dict[str, list[dict[str, Any]]]) -> None:
    assert [result["sentence"] for result in results["right"]] == ["", ""]
