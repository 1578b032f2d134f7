"""AdamW with decay groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradsync.train.config import OptimConfig

if TYPE_CHECKING:
    from torch import nn


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: matrices decay, vectors (norm weights) do not.

    Fused where the device has the kernel (CPU and CUDA do), one pass over the parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.fused,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for the coming step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
