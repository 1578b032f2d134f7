"""AdamW's groups and steps, and the learning rate of each step, against numbers by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradsync as gs
from gradsync.comm.groups import SingleCommunicator
from gradsync.commands.bench.entrants import micro_batches_of
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import OptimConfig
from gradsync.commands.train.learner import Learner, build_optimizer, learning_rate
from gradsync.errors import ConfigError
from gradsync.world import World

CONFIG = OptimConfig(lr=0.01, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.linear.tied = self.table.weight  # counted once
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_matrices_decay_vectors_do_not_and_the_settings_arrive() -> None:
    model = Net()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG)
    found = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert found == [["table.weight", "linear.weight"], ["norm.weight", "norm.bias", "linear.bias"]]
    for group, decay in zip(optimizer.param_groups, (0.25, 0.0), strict=True):
        settings = (0.01, decay, (0.8, 0.9), 1e-6, True)
        assert settings == tuple(
            group[name] for name in ("lr", "weight_decay", "betas", "eps", "fused")
        )
    for group in build_optimizer(Net(), OptimConfig(fused=False)).param_groups:
        assert not group["fused"]


# -- the learning rate ----------------------------------------------------------------------------

UNIT = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=2, decay_fraction=0.5)


def curve(config: OptimConfig, total_steps: int) -> list[float]:
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 0.1 + 0.45 (1 + cos x) for x = 0, 1/4, 1/2, 3/4, 1 of pi; the root of 1/2 is 0.70710678
        ({"schedule": "cosine"}, [0.5, 1.0, 1.0, 0.868198052, 0.55, 0.231801948, 0.1]),
        # The last five of ten steps fall by 0.9 / 5 each.
        ({"schedule": "wsd"}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1]),
        ({"schedule": "wsd", "decay_fraction": 0.001}, [0.5, 1.0] + [1.0] * 7 + [0.1]),
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"schedule": "cosine", "lr": 6e-4, "min_lr_ratio": 0.0}, [3e-4, 6e-4, 6e-4, 3e-4, 0.0]),
    ],
)
def test_schedules_by_hand(changes: dict[str, Any], expected: list[float]) -> None:
    assert curve(replace(UNIT, **changes), len(expected)) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_edges_of_the_warm_up(schedule: str) -> None:
    config = replace(UNIT, schedule=schedule)
    assert curve(replace(config, warmup_steps=0), 10)[0] == 1.0
    assert curve(replace(config, warmup_steps=100), 4) == [0.25, 0.5, 0.75, 1.0]  # a shorter run
    assert learning_rate(replace(config, warmup_steps=0), 0, 1) > 0  # one step alone
    overlapping = replace(config, warmup_steps=6, decay_fraction=0.8)
    assert curve(overlapping, 10)[6] == 1.0  # a decay that would begin before the peak


@pytest.mark.parametrize(
    ("scaling", "tokens", "peak"),
    [("linear", 524_288, 8e-3), ("sqrt", 262_144, 2e-3), ("linear", 32_768, 5e-4)],
)
def test_the_peak_and_the_floor_go_along_with_the_batch(
    scaling: Any, tokens: int, peak: float
) -> None:
    config = OptimConfig(lr=1e-3, lr_scaling=scaling, lr_base_batch=65_536, warmup_steps=2)
    rates = curve(config.scaled(tokens), 9)
    assert max(rates) == pytest.approx(peak, rel=1e-12)
    assert rates[0] == pytest.approx(peak / 2)
    assert rates[-1] == pytest.approx(0.1 * peak)
    assert UNIT.scaled(tokens) == UNIT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scaling": "sqrt"}, "lr_scaling=sqrt and optim.lr_base_batch=None: give both"),
        ({"lr_base_batch": 8}, "lr_scaling=none and optim.lr_base_batch=8: give both"),
        ({"lr_scaling": "linear", "lr_base_batch": 0}, "lr_base_batch must be at least 1; got 0"),
    ],
)
def test_half_a_scaling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**options)


class Casts(TorchDispatchMode):
    """Counts casts of `weights`, and of anything."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._addresses = {weight.data_ptr() for weight in weights}
        self.of_weights = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.all += 1
            self.of_weights += args[0].data_ptr() in self._addresses
        return func(*args, **(kwargs or {}))


def narrow_learner(model: GPT) -> Learner:
    return Learner(
        model=model,
        optimizer=build_optimizer(model, OptimConfig()),
        sync=gs.replicate(model, World()),
        scaler=None,
        comm=SingleCommunicator(),
        autocast=torch.autocast("cpu", dtype=torch.bfloat16),
    )


BATCH = (torch.zeros(1, 8, dtype=torch.int64),) * 2


def test_weights_are_cast_once_but_for_the_last_leaf_and_activations_once_for_their_layers() -> (
    None
):
    shape = GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=32, block_size=8)
    model = GPT(shape)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2]  # the embedding: head
    learner = narrow_learner(model)
    for _ in range(2):
        with Casts(matrices) as casts:
            learner.run_micro_batches(micro_batches_of([BATCH] * 4, World()))
        assert casts.of_weights == 2 * len(matrices) == 16
        learner.sync.step(learner.optimizer)
    learner.sync.close()
    with Casts(()) as casts, torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model.blocks[0](torch.randn(1, 8, 64), model.rope_cos[:8], model.rope_sin[:8])
    # Seven matrices, two norms' results, q and k turned.
    assert casts.all == 7 + 2 + 1


def test_the_last_leafs_gradients_come_in_the_order_of_its_backward() -> None:
    """Autograd runs an older forward's casts behind the rest: no bucket would leave before."""
    shape = GPTConfig(n_layer=2, n_head=1, n_embd=64, vocab_size=32, block_size=8)
    model, order = GPT(shape), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    learner = narrow_learner(model)
    learner.run_micro_batches(micro_batches_of([BATCH] * 2, World()))
    last = order[len(order) // 2 :]
    assert last.index("blocks.1.mlp.down.weight") < last.index("blocks.0.mlp_norm.weight")
    learner.sync.step(learner.optimizer)
    learner.sync.close()
