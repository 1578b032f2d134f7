"""The decoder of architecture gpt2 in others' formats: nanoGPT's checkpoints, transformers' GPT2.

Both use the same names, and one matrix with queries, keys and values, one below the other.
transformers transposes the four matrices of a block (`Conv1D`, here `turned`) and always has
biases: zeros if the decoder has none. The tests compare logits with both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync.commands.models.config import GPTConfig
from gradsync.core.files import one_line
from gradsync.errors import ConfigError

_ENDS = {
    **{"embed": "transformer.wte", "positions": "transformer.wpe"},
    **{"norm": "transformer.ln_f", "head": "lm_head"},
}
_IN_BLOCK = {
    **{"attention_norm": "ln_1", "attention.out": "attn.c_proj"},
    **dict.fromkeys(("attention.q", "attention.k", "attention.v"), "attn.c_attn"),
    **{"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
}
"""Our modules, and GPT-2's."""
_NEEDED = {
    "activation_function": "gelu",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Values that the decoder requires in a `config.json`."""
_DEFAULTS = _NEEDED | {"activation_function": "gelu_new"}
"""Defaults of transformers for a missing entry of `config.json`."""
_MASK = re.compile(r"\.attn\.(bias|masked_bias)$")
_NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


def gpt2_name(name: str) -> str:
    """GPT-2's name of our tensor `name`; ConfigError for one that GPT-2 does not have."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{kind}"
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if found is None or found[2] not in _IN_BLOCK:
        raise ConfigError(f"tensor {name!r} has no counterpart in GPT-2")
    return f"transformer.h.{found[1]}.{_IN_BLOCK[found[2]]}.{kind}"


def to_gpt2(weights: Mapping[str, Tensor], *, turned: bool) -> dict[str, Tensor]:
    """Our weights under the other format's names and in its layout."""
    found: dict[str, Tensor] = {}
    for name, own in weights.items():
        theirs, tensor = gpt2_name(name), own
        if theirs in found:
            continue
        if ".attn.c_attn." in theirs:
            tensor = torch.cat([weights[re.sub(r"\.[qkv]\.", f".{c}.", name)] for c in "qkv"])
        is_matrix = tensor.dim() == 2 and name.startswith("blocks.")
        found[theirs] = tensor.t().contiguous() if turned and is_matrix else tensor
        bias = re.sub(r"weight$", "bias", name)
        if turned and bias not in weights and (is_matrix or tensor.dim() == 1):
            found[gpt2_name(bias)] = tensor.new_zeros(len(tensor))
    return found


def from_gpt2(
    weights: Mapping[str, Tensor], names: Iterable[str], *, turned: bool
) -> dict[str, Tensor]:
    """Weights of the other format, which must be complete, under our `names`."""
    found = {}
    for name in names:
        tensor = weights[gpt2_name(name)]
        if turned and tensor.dim() == 2 and name.startswith("blocks."):
            tensor = tensor.t()
        part = name.split(".")[-2]
        if part in ("q", "k", "v"):
            tensor = tensor.chunk(3)["qkv".index(part)]
        found[name] = tensor.contiguous()
    return found


def plain_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without causal masks, which old files hold, and with `transformer.` before each name
    but the head's."""
    return {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in weights.items()
        if not _MASK.search(f".{name}")
    }


def nanogpt_shape(args: Any, *, tie_head: bool) -> GPTConfig:
    """The decoder's shape from the `model_args` of a nanoGPT checkpoint; ConfigError for a field
    that is missing, unknown, or has an unsupported value."""
    if not isinstance(args, dict):
        raise ConfigError(f"model_args: got {type(args).__name__}, expected a dict")
    if missing := [name for name in _NANOGPT if name not in args]:
        raise ConfigError(f"model_args has no {', '.join(missing)}")
    if unknown := [name for name in args if name not in (*_NANOGPT, "bias", "dropout")]:
        raise ConfigError(f"model_args.{one_line(unknown[0])} is not a field of nanoGPT's model")
    given: dict[str, Any] = {"bias": True, **args, "dropout": float(args.get("dropout", 0.0))}
    return GPTConfig(architecture="gpt2", tie_head=tie_head, **given)


def gpt2_config(shape: GPTConfig, *, end_of_text: int | None) -> dict[str, Any]:
    """The `config.json` of a model of this shape; `end_of_text` as for `llama_config`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **_NEEDED,
        "n_embd": shape.n_embd,
        "n_inner": shape.mlp_dim,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_positions": shape.block_size,
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tie_head,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop"), shape.dropout),
        "attn_pdrop": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        "dtype": "float32",
    }


def gpt2_shape(config: Mapping[str, Any]) -> GPTConfig:
    """The decoder's shape from a `config.json` of model_type gpt2; ConfigError for a value that it
    does not have."""
    for name, value in _NEEDED.items():
        if (got := config.get(name, _DEFAULTS[name])) != value:
            raise ConfigError(f"{name} must be {value!r}; got {one_line(repr(got))}")
    try:
        return GPTConfig(
            architecture="gpt2",
            bias=True,
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            vocab_size=config["vocab_size"],
            block_size=config["n_positions"],
            hidden_dim=config.get("n_inner"),
            dropout=config.get("resid_pdrop", 0.1),
            tie_head=config.get("tie_word_embeddings", True),
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"config.json is not of a GPT-2: {one_line(error)}") from None
