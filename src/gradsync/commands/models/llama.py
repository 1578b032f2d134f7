"""The decoder as transformers' Llama: its `config.json`, the names of its tensors, and back.

The two compute the same: RMSNorm, rotary positions in halves, SwiGLU, grouped-query attention. The
tests compare logits with `LlamaForCausalLM`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from gradsync.commands.models.config import GPTConfig
from gradsync.core.files import one_line
from gradsync.errors import ConfigError

_PAIRS = (
    (r"embed\.", "model.embed_tokens."),
    (r"norm\.", "model.norm."),
    (r"head\.", "lm_head."),
    (r"blocks\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"blocks\.(\d+)\.mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"blocks\.(\d+)\.attention\.out\.", r"model.layers.\1.self_attn.o_proj."),
    (r"blocks\.(\d+)\.attention\.([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
)
"""A pattern for our name, and Llama's."""
_NEEDED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Values that the decoder requires in a `config.json`; missing entries count as these."""


def llama_name(name: str) -> str:
    """Llama's name of our tensor `name`; ConfigError for one that Llama does not have."""
    for ours, theirs in _PAIRS:
        if found := re.match(ours, name):
            return found.expand(theirs) + name[found.end() :]
    raise ConfigError(f"tensor {name!r} has no counterpart in transformers' Llama")


def to_llama(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under Llama's names."""
    return {llama_name(name): tensor for name, tensor in weights.items()}


def from_llama(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Llama's weights under our `names`, without rotary tables, which follow from the shape;
    ConfigError for a tensor that the decoder does not have."""
    ours = {llama_name(name): name for name in names}
    found = {n: t for n, t in weights.items() if not n.endswith("rotary_emb.inv_freq")}
    for name in found:
        if name not in ours:
            raise ConfigError(f"tensor {name!r} has no counterpart in the decoder")
    return {ours[name]: tensor for name, tensor in found.items()}


def llama_config(shape: GPTConfig, *, end_of_text: int | None) -> dict[str, Any]:
    """The `config.json` of a model of this shape; `end_of_text` is the id of the token that ends a
    text, or None."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_NEEDED,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.mlp_dim,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.block_size,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # and 5
        "rope_scaling": None,
        "tie_word_embeddings": shape.tie_head,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": "float32",
    }


def shape_of(config: Mapping[str, Any]) -> GPTConfig:
    """The decoder's shape from a `config.json`; ConfigError for another architecture, or a value
    that the decoder does not have."""
    if config.get("model_type") != "llama":
        raise ConfigError(f"model_type {config.get('model_type')!r} is not llama")
    for name, value in _NEEDED.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{name} must be {value!r}; got {config[name]!r}")
    try:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"rotary positions of type {kind!r} are not known here")
        heads, width = config["num_attention_heads"], config["hidden_size"]
        if config.get("head_dim") not in (None, width // heads):
            raise ConfigError(f"head_dim must be {width // heads}; got {config['head_dim']}")
        return GPTConfig(
            n_layer=config["num_hidden_layers"],
            n_head=heads,
            n_kv_head=config.get("num_key_value_heads"),
            n_embd=width,
            vocab_size=config["vocab_size"],
            block_size=config["max_position_embeddings"],
            hidden_dim=config["intermediate_size"],
            tie_head=config.get("tie_word_embeddings", False),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
            norm_eps=config.get("rms_norm_eps", 1e-6),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config.json is not of a Llama: {one_line(error)}") from None
