"""A forward that cannot be repeated, or is not finite, is called that and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.groups import communicator
from gradsync.commands.verify.cell import Setting, run_cell
from gradsync.commands.verify.settings import Cell, VerifySettings
from support.rank_session import open_session

SETTINGS = VerifySettings(num_steps=2)


class Net(nn.Module):
    """A small classifier of inputs that `change(model, inputs)` makes."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.change, self.seen = change, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.change(self, x))


def minus_the_running_mean(net: Any, x: Tensor) -> Tensor:
    net.seen = 0.9 * net.seen + 0.1 * float(x.mean())
    return x - net.seen


# Change of the inputs, factor of the loss, and the finding: cause, what, why.
FORWARD = "the forward is not reproducible"
FINITE = "not finite on one rank either"
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], float, tuple[str, str, str]]] = {
    "right": (lambda _, x: x, 1.0, ("", "", "")),
    "by_rank": (
        lambda _, x: x * (1 + torch.distributed.get_rank()),
        1.0,
        ("unknown", f"rank 1: {FORWARD}", "depends on the rank"),
    ),
    "by_numpy": (
        lambda _, x: x * (1 + np.random.rand()),
        1.0,
        ("", "", ""),  # keyed by the leaf
    ),
    "by_python": (
        lambda net, x: x * (1 + random.random() * net.training),
        1.0,
        ("", "", ""),
    ),
    "by_memory": (minus_the_running_mean, 1.0, ("unknown", FORWARD, "kept between forwards")),
    "not_finite": (lambda _, x: x * float("nan"), 1.0, ("unknown", FINITE, "loss")),
    "too_large": (lambda _, x: x, 1e30, ("unknown", FINITE, "gradient norm")),
}


def __getattr__(name: str) -> Callable[[], Any]:
    """The factory of each entry of `CASES`, where a target's name is looked up in this module."""
    if name not in CASES:
        raise AttributeError(name)
    change, scale, _ = CASES[name]

    def loss_sum(output: Tensor, target: Tensor) -> Tensor:
        return scale * F.cross_entropy(output, target, reduction="sum")

    def factory() -> Any:
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        return Net(change), TensorDataset(x, torch.arange(40) % 4), loss_sum

    return factory


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
    return dict(zip(CASES, pool.run(_verify, 2, list(CASES))[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_no_strategy_can_help(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    cause, what, why = CASES[name][2]
    for result in results[name]:
        if not cause or (name == "by_rank" and result["strategy"] == "local_sgd"):
            # Alone, each rank is held to its own forward: nothing to be seen.
            assert (result["status"], result["sentence"]) == ("passed", "")
        else:
            assert (result["status"], result["cause"]) == ("failed", cause), result["sentence"]
            assert what in result["sentence"]
            assert why in result["sentence"]
