"""This rank's part of weights and optimizer state, whole tensors, and conversions between them.

A `Share` is a run of elements of a whole tensor, row after row. Pieces of flat buckets and a
DTensor's rows are shares; checkpoints store shares separately.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from gradsync.comm.base import Work
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

State = dict[str, Any]
"""Optimizer state of one parameter, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The elements of one whole tensor that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """First element of the flattened tensor."""
    stop: int
    """Element after the last one."""
    saves: bool = True
    """False if another rank holds the same elements and saves them."""


HeldState = dict[Any, tuple[Share, State]]
"""Parameter -> this rank's share of it, and the optimizer state there. Tensors with one value per
element are flat. A parameter without state has {}."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Ranks in the order of the shards that they own in each bucket."""

    rank: int
    world_size: int
    all_gather: Callable[[Tensor, Tensor], Work]
    """See `Communicator`."""


def flat_state(state: Mapping[str, Any], like: Tensor) -> State:
    """Flatten tensors with one value per element of `like`, sharing memory; keep other values."""
    return {
        name: local(value).reshape(-1) if is_elementwise(name, value, like) else value
        for name, value in state.items()
    }


def is_elementwise(name: str, value: Any, like: Tensor) -> bool:
    """Whether this state has one value per element of `like`, not a single one.

    Raises:
        ConfigError: it has neither, so ranks cannot divide it.
    """
    if not isinstance(value, Tensor) or (value.dim() == 0 and value.shape != like.shape):
        return False
    if value.shape != like.shape:
        raise ConfigError(
            f"optimizer state {name!r} has shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(like.shape)}: neither elementwise nor a single number; this optimizer cannot "
            "be sharded"
        )
    return True


# -- sharded tensors (DTensor) and whole ones -----------------------------------------------------


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Importing their module takes half a second, so without it: False."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; returns a plain tensor unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor.detach()


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor, equal on all ranks, as `like` is; nothing is sent. Keeps its dtype, and
    may share its memory."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor.detach()
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.detach().to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
