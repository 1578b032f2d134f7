"""Whether a host can hold a model, by formulas, before anything is built. No torch here."""

from __future__ import annotations

from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.runtime.machine import total_bytes


def check_size(shape: GPTConfig, *, device: str, num_nodes: int) -> None:
    """Refuse a model that this host cannot hold, however its ranks share it out.

    All weights are drawn in host memory first. Gradients and AdamW's two moments lie there too on
    CPUs; several hosts may share them out.

    Args:
        device: "cpu"; with any other only the weights count.
        num_nodes: hosts of the run.

    Raises:
        ConfigError: naming what it takes and what there is.
    """
    copies = 4 if device == "cpu" and num_nodes == 1 else 1
    rotary = 2 * shape.block_size * shape.head_dim
    need_gb = 4 * (copies * shape.num_params() + rotary) / 1e9
    host_gb = total_bytes() / 1e9
    if need_gb > host_gb:
        raise ConfigError(
            f"to train {shape.num_params():.3g} parameters takes {need_gb:.3g} GB at least, and "
            f"this host has {host_gb:.3g} GB: lower --model.n-layer, --model.n-embd, "
            f"--model.block-size ({shape.block_size:,}) or the vocabulary ({shape.vocab_size:,})"
        )
