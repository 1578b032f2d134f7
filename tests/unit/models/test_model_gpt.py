"""The decoder against an independent implementation, and its promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, loss_sum, rope_tables, rotate
from gradsync.commands.train.foreign import hf_config, to_llama
from gradsync.errors import ConfigError
from support.launchers import run_python

SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=32, vocab_size=61, block_size=24, hidden_dim=48)


def tokens(config=SMALL, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, config.block_size), generator=generator)


def gradients(model, tokens_BT):
    model.zero_grad()
    loss_sum(model(tokens_BT), tokens_BT.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def llama_like(config):
    known = hf_config(config, end_of_text=None)
    return LlamaForCausalLM(LlamaConfig(**known, attn_implementation="eager"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_head": False},
        {"n_kv_head": 2},
        {"n_kv_head": 1, "tie_head": False, "rope_theta": 500.0, "norm_eps": 1e-3},
        {"n_layer": 3, "n_head": 3, "n_embd": 42, "hidden_dim": 50, "block_size": 40},
    ],
)
def test_equals_llama_of_transformers_with_the_same_weights(changes):
    config = replace(SMALL, **changes)
    ours, theirs = GPT(config, seed=3), llama_like(config)
    # Larger and rounder than the start values, so that a wrong gain or rotation shows.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    missing = theirs.load_state_dict(to_llama(ours.state_dict()), strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if config.tie_head else [])
    # Also without the duplicate removal of `parameters()`: nothing is shared.
    for counted in (ours.parameters(), ours.state_dict().values()):
        assert sum(tensor.numel() for tensor in counted) == config.num_params()

    x = tokens(config)
    expected = theirs(input_ids=x).logits
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)

    F.cross_entropy(expected.flatten(0, 1), x.roll(-1, 1).flatten(), reduction="sum").backward()
    their_gradients = dict(theirs.named_parameters())
    for name, gradient in to_llama(gradients(ours, x)).items():
        expected_gradient = their_gradients[name].grad
        scale = expected_gradient.abs().max().item()
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5 * scale)


def test_a_position_sees_only_the_past():
    model = GPT(SMALL).eval()
    x = tokens(batch=1)
    changed = x.clone()
    changed[0, 10] = (x[0, 10] + 1) % SMALL.vocab_size
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_start_values_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = GPT(SMALL, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(6)
    again, other = GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_start_values_have_the_documented_size_and_lengths_a_limit():
    with pytest.raises(ConfigError, match=r"sequence of 25 tokens: .*block_size=24"):
        GPT(SMALL)(torch.zeros(1, 25, dtype=torch.int64))
    model = GPT(GPTConfig(n_layer=8, n_embd=256, n_head=4))
    block = model.blocks[3]
    assert block.attention.q.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.mlp_norm.weight.eq(1).all()


def test_rotation_of_bf16_rounds_only_once():
    config = replace(SMALL, block_size=4096)
    cos_TK, sin_TK = rope_tables(config)
    x = torch.randn(1, 4096, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = rotate(x, cos_TK, sin_TK)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, rotate(x.float(), cos_TK, sin_TK).bfloat16())
    # A rotation keeps lengths, and position 0 is not turned.
    lengths = [t.double().square().sum(-1).sqrt() for t in (x, low)]
    torch.testing.assert_close(lengths[1], lengths[0], rtol=2**-8, atol=0)
    assert torch.equal(low[:, 0], x[:, 0])


def test_bf16_autocast_stays_close_to_fp32():
    model, x = GPT(SMALL), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
        assert low.dtype == torch.bfloat16
        loss = loss_sum(low, x)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(low.float(), model(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_keeps_every_bit(autocast):
    config = replace(SMALL, dropout=0.2)
    plain = GPT(config, seed=4)
    recomputing = GPT(config, seed=4, activation_checkpointing=True)
    runs = []
    for model in (plain, recomputing):
        torch.manual_seed(11)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            runs.append(gradients(model, tokens()))
    for name, gradient in runs[0].items():
        assert torch.equal(gradient, runs[1][name]), name
    calls = []
    recomputing.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(recomputing, tokens())
    assert len(calls) == 2
    gradients(recomputing.eval(), tokens())
    assert len(calls) == 3


def test_compiles_without_a_graph_break():
    compiled = torch.compile(GPT(SMALL), fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens()), GPT(SMALL)(tokens()))


def test_loss_sum_by_hand_and_without_padding():
    logits = torch.zeros(1, 4, 10)
    targets = torch.tensor([[1, 2, -100, 3]])
    assert loss_sum(logits, targets).item() == pytest.approx(3 * 2.302585, rel=1e-6)
    nothing = loss_sum(logits.requires_grad_(), torch.full((1, 4), -100))
    nothing.backward()
    assert nothing.item() == 0.0
    assert not logits.grad.any()
    many = torch.zeros(4, 512, 16, dtype=torch.bfloat16)  # a sum in bf16 would saturate
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_sum(many, torch.zeros(4, 512, dtype=torch.int64))
        assert (loss.dtype, loss.ndim) == (torch.float32, 0)
        assert loss.item() == pytest.approx(2048 * 2.772589, rel=1e-5)


def test_sums_of_leaves_are_the_sum_of_the_batch():
    model, x = GPT(SMALL).double(), tokens(batch=4)
    whole = gradients(model, x)
    parts = [gradients(model, x[i : i + 1]) for i in range(4)]
    for name, gradient in whole.items():
        # fp32 loss of double logits: equal to rounding.
        total = sum(part[name] for part in parts)
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


SLOW_IMPORTS = """
import sys
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
import gradsync.commands.train.run
GPT(GPTConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=64, block_size=16, tie_head=False))
slow = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"]
slow += ["torch.utils.tensorboard", "wandb"]
print(*(name for name in slow if name in sys.modules))
"""


def test_a_start_imports_no_compiler_no_sharded_tensors_and_no_tracker() -> None:
    """The first two together would be a third of the time that a rank takes to begin."""
    assert run_python(["-c", SLOW_IMPORTS]).ok().stdout == "\n"
