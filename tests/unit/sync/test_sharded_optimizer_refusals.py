"""Optimizers that cannot be sharded are refused by name, at once or as soon as this shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradsync.errors import ConfigError
from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer, layout_of


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
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be sharded: its line search"),
        (torch.optim.Adafactor, "Adafactor cannot be sharded: it keeps row and column means"),
        (torch.optim.Muon, "Muon cannot be sharded: it orthogonalises"),
        (torch.optim.SparseAdam, "SparseAdam cannot be sharded: it updates rows of sparse"),
        (ShardedOptimizer, "ShardedOptimizer cannot be sharded: it is sharded already"),
    ],
)
@pytest.mark.parametrize("promised", [False, True])
def test_optimizers_that_are_not_elementwise(
    kind: type[torch.optim.Optimizer], why: str, promised: bool
) -> None:
    with pytest.raises(ConfigError, match=why):
        ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], kind, elementwise=promised)


def test_an_unknown_optimizer_needs_a_promise() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ConfigError, match=r"Sign is not known to be elementwise .* elementwise=True"
    ):
        ShardedOptimizer([parameter], Sign)
    with pytest.raises(ConfigError, match="Sign is not known"):
        ShardedOptimizer.like(Sign([parameter]), comm=None)  # type: ignore[arg-type]
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
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros(2)}
    with pytest.raises(ConfigError, match=r"'momentum_buffer' has shape \(2,\)"):
        optimizer.take_from(optimizer)


def test_parameters_that_cannot_be_cut() -> None:
    turned = nn.Parameter(torch.ones(4, 3).t())
    with pytest.raises(ConfigError, match=r"parameter 'w', shape \(3, 4\), .* not contiguous"):
        ShardedOptimizer([("w", turned)], torch.optim.SGD)
    with pytest.raises(ConfigError, match="an iterable of parameters, got one tensor"):
        ShardedOptimizer(torch.ones(3), torch.optim.SGD)
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="parameter 1 of group 0 is in the optimizer, but not in"):
        ShardedOptimizer([first, second], torch.optim.SGD, plan=layout_of([first], 1))


def test_gradients_that_cannot_be_used() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = ShardedOptimizer(table.named_parameters(), torch.optim.SGD)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="parameter 'weight' has a sparse gradient"):
        optimizer.step()
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
