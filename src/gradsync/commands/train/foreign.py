"""The decoder in the formats of transformers: Llama and GPT-2.

Both architectures compute the same as ours; the tests compare logits. GPT-2 has one matrix with
queries, keys and values, one below the other, transposes the four matrices of its blocks
(`Conv1D`), and always has biases: zeros if the decoder has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.tensor_file import read_tensors
from gradsync.checkpoint.weights import match_weights
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import weights_of
from gradsync.core.files import one_line, read_object
from gradsync.errors import ConfigError

_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks.N.attention_norm": "model.layers.N.input_layernorm",
    "blocks.N.attention.q": "model.layers.N.self_attn.q_proj",
    "blocks.N.attention.k": "model.layers.N.self_attn.k_proj",
    "blocks.N.attention.v": "model.layers.N.self_attn.v_proj",
    "blocks.N.attention.out": "model.layers.N.self_attn.o_proj",
    "blocks.N.mlp_norm": "model.layers.N.post_attention_layernorm",
    "blocks.N.mlp.gate": "model.layers.N.mlp.gate_proj",
    "blocks.N.mlp.up": "model.layers.N.mlp.up_proj",
    "blocks.N.mlp.down": "model.layers.N.mlp.down_proj",
}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks.N.attention_norm": "transformer.h.N.ln_1",
    "blocks.N.attention.q": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.k": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.v": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.out": "transformer.h.N.attn.c_proj",
    "blocks.N.mlp_norm": "transformer.h.N.ln_2",
    "blocks.N.mlp.up": "transformer.h.N.mlp.c_fc",
    "blocks.N.mlp.down": "transformer.h.N.mlp.c_proj",
}
"""Our modules, and theirs; N is the number of a block."""

_NEEDED_LLAMA = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_NEEDED_GPT2 = {
    "activation_function": "gelu",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Values that the decoder requires in a `config.json`."""


def their_name(name: str, names: Mapping[str, str]) -> str:
    """Their name of our tensor `name`; ConfigError for one that they do not have."""
    module, _, kind = name.rpartition(".")
    block = re.match(r"blocks\.(\d+)\.", module)
    number = f".{block[1]}." if block else ".N."
    if (theirs := names.get(module.replace(number, ".N.", 1))) is None:
        raise ConfigError(f"tensor {name!r} has no counterpart in transformers")
    return f"{theirs.replace('.N.', number)}.{kind}"


def to_llama(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under Llama's names."""
    return {their_name(name, _LLAMA): tensor for name, tensor in weights.items()}


def to_gpt2(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under GPT-2's names and in its layout."""
    found: dict[str, Tensor] = {}
    for name, own in weights.items():
        theirs, tensor = their_name(name, _GPT2), own
        if theirs in found:
            continue
        if ".attn.c_attn." in theirs:
            tensor = torch.cat([weights[re.sub(r"\.[qkv]\.", f".{c}.", name)] for c in "qkv"])
        is_matrix = tensor.dim() == 2 and name.startswith("blocks.")
        found[theirs] = tensor.t().contiguous() if is_matrix else tensor
        bias = re.sub(r"weight$", "bias", name)
        if bias not in weights and (is_matrix or tensor.dim() == 1):
            found[their_name(bias, _GPT2)] = tensor.new_zeros(len(tensor))
    return found


def from_hf(weights: Mapping[str, Tensor], shape: GPTConfig) -> dict[str, Tensor]:
    """Weights of transformers under our names; CheckpointError if some are missing or unknown. Old
    files hold causal masks or rotary tables, which are left out, and those of GPT-2 no
    `transformer.` before the names."""
    names, convert = (_GPT2, to_gpt2) if shape.is_gpt2 else (_LLAMA, to_llama)
    prefix = "transformer." if shape.is_gpt2 else "model."
    theirs = {
        name if name.startswith((prefix, "lm_head.")) else f"{prefix}{name}": tensor
        for name, tensor in weights.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"))
    }
    if shape.tie_head:  # some files hold the embedding again under the head's name
        theirs.pop("lm_head.weight", None)
    own = {each.name: torch.empty(each.shape, device="meta") for each in weights_of(shape)}
    matched = match_weights(convert(own), theirs)
    found = {}
    for name in own:
        tensor, part = matched[their_name(name, names)], name.split(".")[-2]
        if shape.is_gpt2 and tensor.dim() == 2 and name.startswith("blocks."):
            tensor = tensor.t()
        if shape.is_gpt2 and part in ("q", "k", "v"):
            tensor = tensor.chunk(3)["qkv".index(part)]
        found[name] = tensor.contiguous()
    return found


_LLAMA_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_head",
}
_GPT2_FIELDS = {
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_inner": "hidden_dim",
    "vocab_size": "vocab_size",
    "n_positions": "block_size",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_head",
    "resid_pdrop": "dropout",
}
"""Their settings of a shape, and ours."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
    },
}
"""What transformers takes where a `config.json` says nothing."""


def hf_config(shape: GPTConfig, *, end_of_text: int | None) -> dict[str, Any]:
    """The `config.json` of a model of this shape for transformers; `end_of_text` is the id of the
    token that ends a text, or None."""
    sizes = {**asdict(shape), "n_kv_head": shape.num_kv_heads, "hidden_dim": shape.mlp_dim}
    if shape.is_gpt2:
        own = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **_NEEDED_GPT2,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
            "bos_token_id": end_of_text,
        }
    else:
        own = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **_NEEDED_LLAMA,
            "head_dim": shape.head_dim,
            "rope_theta": shape.rope_theta,  # transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # and 5
            "rope_scaling": None,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "pad_token_id": None,
        }
    fields = _GPT2_FIELDS if shape.is_gpt2 else _LLAMA_FIELDS
    own |= {theirs: sizes[ours] for theirs, ours in fields.items()}
    return own | {"eos_token_id": end_of_text, "dtype": "float32"}


def hf_shape(given: Mapping[str, Any]) -> GPTConfig:
    """The decoder's shape from transformers' `config.json`; ConfigError for another architecture,
    or a value that the decoder does not have."""
    kind = given.get("model_type")
    if kind not in _DEFAULTS:
        raise ConfigError(f"model_type must be llama or gpt2; got {one_line(repr(kind))}")
    is_gpt2 = kind == "gpt2"
    needed, fields = (_NEEDED_GPT2, _GPT2_FIELDS) if is_gpt2 else (_NEEDED_LLAMA, _LLAMA_FIELDS)
    config: dict[str, Any] = {**needed, **_DEFAULTS[kind], **given}
    for name, value in needed.items():
        if config[name] != value:
            raise ConfigError(f"{name} must be {value!r}; got {one_line(repr(config[name]))}")
    try:
        sizes = {ours: config[theirs] for theirs, ours in fields.items()}
        if is_gpt2:
            return GPTConfig(architecture="gpt2", bias=True, **sizes)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        turns = rope.get("rope_type", rope.get("type", "default"))
        if turns != "default":
            raise ConfigError(f"rotary positions of type {turns!r} are not known here")
        if config.get("head_dim") not in (None, head_dim := sizes["n_embd"] // sizes["n_head"]):
            raise ConfigError(f"head_dim must be {head_dim}; got {config['head_dim']}")
        theta = float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))
        return GPTConfig(**sizes, rope_theta=theta)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config.json is not of a {kind}: {one_line(error)}") from None


def read_hf(folder: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The shape and the weights, under our names, of a Llama or GPT-2 of transformers:
    `config.json` and `*.safetensors`. ConfigError, CheckpointError: a shape or a tensor that the
    decoder does not have, or a missing one."""
    shape = hf_shape(read_object(folder / "config.json"))
    files = sorted(folder.glob("*.safetensors"))
    theirs = {name: t for file in files for name, t in read_tensors(file, {}).items()}
    return shape, from_hf(theirs, shape)
