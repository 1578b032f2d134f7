"""Shapes and presets, by value."""

from __future__ import annotations

import dataclasses

import pytest

from gradsync.commands.models.config import PRESETS, GPTConfig, preset
from gradsync.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 0}, "n_layer: got 0, expected a positive integer"),
        ({"vocab_size": 2.5}, "vocab_size: got 2.5"),
        ({"n_embd": 100, "n_head": 3}, "n_embd must be a multiple of n_head; got 100 and 3"),
        ({"n_embd": 12, "n_head": 4}, "n_embd / n_head must be even"),
        ({"n_head": 4, "n_kv_head": 3}, "got 4 and 3"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"architecture": "bert"}, "got 'bert', expected llama or gpt2"),
        ({"bias": True}, "only architecture gpt2 has biases"),
        ({"architecture": "gpt2", "n_kv_head": 2}, "n_kv_head: got 2, but architecture gpt2"),
    ],
)
def test_impossible_shapes_are_refused_with_the_numbers(changes, words):
    with pytest.raises(ConfigError) as caught:
        GPTConfig(**changes)
    assert words in str(caught.value)


def test_hidden_width_is_eight_thirds_rounded_up_to_64():
    assert [GPTConfig(n_embd=w).mlp_dim for w in (24 * 8, 256, 512, 768)] == [512, 704, 1408, 2048]
    assert GPTConfig(n_embd=256, hidden_dim=100).mlp_dim == 100
    assert GPTConfig(n_embd=256, architecture="gpt2").mlp_dim == 1024


def test_presets():
    sizes = {
        name: (config.n_embd, config.n_layer, round(config.num_params() / 1e6, 1))
        for name, config in PRESETS.items()
    }
    assert sizes == {
        "tiny": (192, 4, 1.8),
        "mini": (512, 8, 29.9),
        "small": (768, 12, 123.6),
        "medium": (1024, 24, 355.1),
        "large": (1280, 36, 778.1),
        "xl": (1600, 48, 1560.0),
        "1.3b": (2048, 24, 1317.3),
        "2.7b": (2560, 32, 2650.6),
    }
    with pytest.raises(ConfigError, match="unknown model preset 'tinny'"):
        preset("tinny")
    config = dataclasses.replace(preset("tiny"), vocab_size=1000)  # that of the data
    assert config.num_params() - preset("tiny").num_params() == (1000 - 256) * 192


def test_training_flops_by_hand():
    # One layer, 2 heads of 4, 8 wide, 16 inside the SwiGLU, 10 tokens in the vocabulary.
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "hidden_dim": 16, "vocab_size": 10}
    tied = GPTConfig(**sizes)
    assert tied.num_params() == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8
    assert tied.flops_per_token(32) == 6 * tied.num_params() + 12 * 1 * 2 * 4 * 32
    # A table that is only looked up multiplies nothing.
    assert GPTConfig(**sizes, tie_head=False).flops_per_token(32) == tied.flops_per_token(32)


def test_gpt2_has_its_published_sizes():
    # Radford et al. 2019, as transformers count them: "124M" and "355M".
    sizes = {"architecture": "gpt2", "bias": True, "vocab_size": 50_257, "block_size": 1024}
    small = GPTConfig(n_layer=12, n_head=12, n_embd=768, **sizes)
    assert small.num_params() == 124_439_808
    assert GPTConfig(n_layer=24, n_head=16, n_embd=1024, **sizes).num_params() == 354_823_168
    multiplied = small.num_params() - 1024 * 768  # positions are looked up
    assert small.flops_per_token(8) == 6 * multiplied + 12 * 12 * 768 * 8
