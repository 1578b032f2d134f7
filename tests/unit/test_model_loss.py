"""The loss in rows is the loss, with less in memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT, loss_sum, loss_sum_in_rows
from gradsync.train.config import TrainConfig

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=37, block_size=8)


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(3 * loss, list(named.values())), strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 24, 1000])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_the_loss_of_the_whole(rows: int, tied: bool, dtype: torch.dtype | None) -> None:
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=37, block_size=8, tie_head=tied)
    model = GPT(shape, loss_rows=rows)
    tokens = torch.arange(24).view(3, 8)
    targets = (tokens * 7 % 37).masked_fill(tokens % 5 == 0, -100)
    targets[1] = -100  # with five rows, a piece without any target
    context = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()
    with context:
        whole = loss_sum(model(tokens), targets)
        pieces = model(tokens, targets)
    with context, torch.no_grad():
        without_gradient = model(tokens, targets)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(pieces, whole, **tolerance)
    assert pieces.dtype == torch.float32
    assert torch.equal(pieces, without_gradient)
    expected = gradients(model, whole)
    for name, found in gradients(model, pieces).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(found / scale, expected[name] / scale, **tolerance)


def test_the_whole_loss_of_the_model_is_that_of_its_logits() -> None:
    model = GPT(SHAPE)
    tokens = torch.arange(16).view(2, 8)
    assert torch.equal(model(tokens, tokens), loss_sum(model(tokens), tokens))


def test_no_more_than_its_rows_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, torch.dtype]] = []

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((len(x), weight.dtype))
        return x @ weight.T

    monkeypatch.setattr("gradsync.models.gpt.F.linear", linear)
    x = torch.randn(23, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_sum_in_rows(x, torch.randn(11, 4), torch.zeros(23, dtype=torch.int64), 10)
    loss.backward()
    assert seen == [(rows, torch.bfloat16) for rows in (10, 10, 3)]
    assert x.grad is not None


@pytest.mark.parametrize("changes", [{"dtype": "fp16"}, {"compile": "model"}])
def test_what_it_does_not_go_with(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="loss_rows works with dtype bf16 or fp32"):
        TrainConfig(loss_rows=64, **changes)
    with pytest.raises(ConfigError, match="loss_rows must be at least 1; got 0"):
        TrainConfig(loss_rows=0)
