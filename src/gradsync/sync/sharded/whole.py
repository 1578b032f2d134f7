"""Conversion between sharded tensors (DTensor) and whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather whole parameters and buffers by name, as `state_dict()` of the unsharded model.

    Works on any model; under FSDP2 all ranks must call it, and each gets everything: one
    all-gather per sharded parameter over its own group, shape and dtype of the masters.
    """
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def load_whole_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers with whole ones, equal on all ranks; nothing is sent."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            local(own[name]).copy_(part_of(tensor, own[name]))


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; a plain one is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor if it were sharded as `like`; nothing is sent."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return local(tensor)
    tensor = tensor.detach().to(like.device)
    sharded = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return local(sharded)


def shaped_as(value: Any, like: Tensor) -> Any:
    """Place and shape this rank's flat elements as `like`; a number stays as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if not isinstance(like, DTensor):
        return value.view(like.shape)
    copy = torch.zeros_like(like, dtype=value.dtype)
    local(copy).view(-1).copy_(value)
    return copy


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a copy of a whole tensor, placed as `like`; its dtype stays."""
    copy = torch.zeros_like(like, dtype=tensor.dtype)
    local(copy).copy_(part_of(tensor, like))
    return copy
