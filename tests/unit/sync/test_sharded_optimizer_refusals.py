"""Optimizers that cannot be sharded are refused by name, at once or as soon as this shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.errors import ConfigError
from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer


class RowMeans(torch.optim.SGD):
    """Looks at whole rows, and says so in its state."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row_means"] = torch.zeros(3)


class Sign(torch.optim.Optimizer):
    """Not of torch, but elementwise."""

    def __init__(self, params: object, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


@pytest.mark.parametrize(
    "kind",
    [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, ShardedOptimizer, Sign, "AdamW"],
)
def test_optimizers_that_are_not_known_to_be_elementwise(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not known to be elementwise .*elementwise=True"):
        ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], kind)


def test_an_unknown_optimizer_needs_a_promise() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([parameter], Sign, elementwise=True, lr=0.25)
    parameter.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    assert parameter.tolist() == [0.75, 1.25, 1.0]


def test_a_broken_promise_shows_in_the_state() -> None:
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(2, 3))], RowMeans, elementwise=True)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"state 'row_means' has shape \(3,\) for .* \(6,\)"):
        optimizer.state_dict()


def test_loaded_state_must_fit() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = ShardedOptimizer([parameter], torch.optim.SGD, momentum=0.9)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": torch.zeros(2)}}}
    with pytest.raises(ConfigError, match=r"'momentum_buffer' has shape \(2,\)"):
        optimizer.load_state_dict(state)


def test_parameters_that_cannot_be_cut() -> None:
    turned = nn.Parameter(torch.ones(4, 3).t())
    with pytest.raises(ConfigError, match=r"parameter 'w', shape \(3, 4\), .* not contiguous"):
        ShardedOptimizer([("w", turned)], torch.optim.SGD)


def test_gradients_of_parameters_that_were_frozen() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3)), frozen], torch.optim.SGD)
    frozen.requires_grad_().grad = torch.ones(3)
    with pytest.raises(ConfigError, match="parameter 1 of group 0 has a gradient, but was frozen"):
        optimizer.step()


def test_options_are_checked_by_the_optimizer_itself() -> None:
    parameters: list[Tensor] = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(parameters, torch.optim.AdamW, lr=-1.0)
    with pytest.raises(TypeError, match="momentum"):
        ShardedOptimizer(parameters, torch.optim.AdamW, momentum=0.9)
