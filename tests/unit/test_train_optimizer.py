"""AdamW: what decays, what does not, and what is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT
from gradsync.train.config import OptimConfig
from gradsync.train.learner import build_optimizer, set_learning_rate

CONFIG = OptimConfig(lr=0.01, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-6)


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {of[id(parameter)] for parameter in parameters}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Net()
    decayed, plain = build_optimizer(model, CONFIG).param_groups
    assert names(model, decayed["params"]) == {"table.weight", "linear.weight"}
    assert names(model, plain["params"]) == {"norm.weight", "norm.bias", "linear.bias"}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)


def test_every_trainable_parameter_of_the_model_once() -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=11, block_size=8))
    groups = build_optimizer(model, CONFIG).param_groups
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())


def test_the_settings_arrive() -> None:
    for group in build_optimizer(Net(), CONFIG).param_groups:
        assert group["lr"] == 0.01
        assert group["betas"] == (0.8, 0.9)
        assert group["eps"] == 1e-6
        assert group["fused"] is True
    for group in build_optimizer(Net(), OptimConfig(fused=False)).param_groups:
        assert not group["fused"]


@pytest.mark.parametrize("kind", ["matrices", "vectors"])
def test_an_empty_group_is_left_out(kind: str) -> None:
    model = nn.Linear(3, 3, bias=False) if kind == "matrices" else nn.LayerNorm(3)
    (group,) = build_optimizer(model, CONFIG).param_groups
    assert group["weight_decay"] == (0.25 if kind == "matrices" else 0.0)


def test_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(Net(), CONFIG)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("fused", [True, False])
def test_two_steps_by_hand(fused: bool) -> None:
    """w <- w - lr (wd w + m / (sqrt(v) + eps)), m and v without their bias; arXiv 1711.05101."""
    lr, decay, b1, b2, eps = 0.1, 0.25, 0.8, 0.9, 1e-6
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    config = OptimConfig(lr=lr, weight_decay=decay, beta1=b1, beta2=b2, eps=eps, fused=fused)
    optimizer = build_optimizer(model, config)
    w, m, v = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        model.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        unbiased = (m / (1 - b1**step)) / (math.sqrt(v / (1 - b2**step)) + eps)
        w = w - lr * decay * w - lr * unbiased
        assert model.weight.item() == pytest.approx(w, rel=1e-12)
