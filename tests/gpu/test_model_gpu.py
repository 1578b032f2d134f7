"""The decoder on a CUDA device."""

from __future__ import annotations

import math

import pytest
import torch

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, generate, loss_sum

pytestmark = pytest.mark.gpu


def config(**changes):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 256, "vocab_size": 61, "block_size": 64}
    return GPTConfig(**{**sizes, **changes})


def batch():
    return torch.randint(61, (3, 64), generator=torch.Generator().manual_seed(0))


def gradients(model, tokens_BT):
    model.zero_grad()
    loss_sum(model(tokens_BT), tokens_BT.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_weights_are_those_of_the_cpu():
    with torch.device("cuda"):
        model = GPT(config(), seed=3)
    assert model.rope_cos.is_cuda
    for name, value in GPT(config(), seed=3).state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value), name


@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_logits_and_gradients_are_close_to_the_cpu(n_kv_head):
    shape = config(n_kv_head=n_kv_head)
    here, there = GPT(shape), GPT(shape).cuda()
    torch.testing.assert_close(there(batch().cuda()).cpu(), here(batch()), rtol=1e-4, atol=1e-4)
    expected = gradients(here, batch())
    for name, gradient in gradients(there, batch().cuda()).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_activation_checkpointing_draws_the_same_dropout(n_kv_head):
    runs = []
    for recompute in (False, True):
        model = GPT(config(dropout=0.2, n_kv_head=n_kv_head), activation_checkpointing=recompute)
        torch.manual_seed(11)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            runs.append(gradients(model.cuda(), batch().cuda()))
    for name, gradient in runs[0].items():
        # Not equal bits: attention's backward and the embedding's add with atomics.
        scale = gradient.abs().max().item()
        torch.testing.assert_close(runs[1][name], gradient, rtol=0.02, atol=0.01 * scale)


def test_it_learns_one_batch_under_bf16():
    model, x = GPT(config()).cuda(), batch().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_sum(model(x[:, :-1]), x[:, 1:])
        (loss / x[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / x[:, 1:].numel())
    assert losses[0] == pytest.approx(math.log(61), abs=0.3)
    assert losses[-1] < 0.5


def test_sampling_repeats():
    model = GPT(config()).cuda()
    assert generate(model, [1, 2], 12, seed=5) == generate(model, [1, 2], 12, seed=5)
