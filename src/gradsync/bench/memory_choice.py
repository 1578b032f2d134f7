"""How much memory a model takes to train, and which one fits. No torch here.

Per rank, for P parameters in fp32 with AdamW: weights, gradients and two states are 16 P bytes, and
torch's DDP holds another copy of the gradients in buckets: 20 P. Activations are those of one leaf,
the logits (and what the loss makes of them) being the largest part. An estimate to choose by, not
a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS

_STATE_BYTES = 16
_BUCKET_BYTES = 4
_LOGIT_BYTES = 16
"""Per logit: the head's own dtype, its fp32 copy, the logarithms and their gradient."""
_PROCESS_BYTES = 400 * 2**20
"""Python and torch."""
_SHARE = 0.9
"""Of what is available: the rest is for everybody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to be held at once."""

    leaf_tokens: int
    """Of one micro-batch."""
    ranks: int
    """Processes in all, idle ones included."""
    busy_ranks: int
    """Processes that train at the same time."""
    contestants: int = 1
    """Models that a rank holds side by side."""


def model_bytes(config: GPTConfig) -> int:
    """Weights, gradients, optimizer state and buckets of one replica."""
    return (_STATE_BYTES + _BUCKET_BYTES) * config.num_params()


def activation_bytes(config: GPTConfig, tokens: int) -> int:
    """What one leaf of `tokens` keeps for backward, and the loss."""
    # Per layer and token: the residual stream twice, norms, q, k, v and attention's output (in
    # bf16 and fp32 copies: 40 bytes a channel), three widths of the SwiGLU (6 bytes each).
    layer = 40 * config.n_embd + 18 * config.mlp_dim
    return tokens * (config.n_layer * layer + _LOGIT_BYTES * config.vocab_size)


def needed_bytes(config: GPTConfig, load: Load) -> int:
    """Of all ranks of the host together."""
    models = load.busy_ranks if load.contestants == 1 else load.ranks * load.contestants
    return (
        load.ranks * _PROCESS_BYTES
        + models * model_bytes(config)
        + load.busy_ranks * activation_bytes(config, load.leaf_tokens)
    )


def fits(config: GPTConfig, load: Load, available: int) -> bool:
    """Whether `available` bytes are enough."""
    return needed_bytes(config, load) <= _SHARE * available


def largest_that_fits(load: Load, available: int) -> str:
    """The largest preset for which `available` bytes are enough, "" when none is."""
    names = [name for name, config in PRESETS.items() if fits(config, load, available)]
    return max(names, key=lambda name: PRESETS[name].num_params(), default="")


def check_fits(name: str, load: Load, available: int) -> None:
    """Refuse a size before anything is started.

    Raises:
        ConfigError: by how much it does not fit, and what does.
    """
    config = PRESETS[name]
    if fits(config, load, available):
        return
    needed = needed_bytes(config, load)
    usable = _SHARE * available
    other = largest_that_fits(load, available)
    cure = f"{other!r} fits" if other else "no size fits: take fewer ranks"
    raise ConfigError(
        f"model {name}: {load.busy_ranks} rank(s) need about {needed / 1e9:.1f} GB, "
        f"{usable / 1e9:.1f} GB can be used here ({(needed - usable) / 1e9:.1f} GB short); {cure}"
    )
