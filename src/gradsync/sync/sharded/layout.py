"""Places of parameters in flat buckets, and refusal of those that cannot have one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.engine.plan import BucketPlan, Item, plan_buckets

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters that are gathered together by default."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Buckets, and the parameters that their slots refer to by index."""

    parameters: Sequence[Tensor]
    """Trainable parameters, each once."""
    buckets: Sequence[BucketPlan]
    """Buckets for the number of ranks that share the state."""


def layout_of(
    parameters: Sequence[Tensor], world_size: int, *, bucket_bytes: float = BUCKET_BYTES
) -> Layout:
    """Make buckets of about `bucket_bytes`, in the parameters' own order.

    Args:
        parameters: trainable ones, each once, any shapes.
        world_size: number of ranks that share the state.
        bucket_bytes: size at which a bucket is closed, bytes.
    """
    items = [
        Item(numel=p.numel(), itemsize=p.element_size(), kind=(p.dtype, p.device))
        for p in parameters
    ]
    plans = plan_buckets(items, range(len(items)), bucket_bytes=bucket_bytes, world_size=world_size)
    return Layout(parameters, plans)


def check_parameters(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse parameters that cannot be cut into flat pieces.

    Raises:
        ConfigError: names the parameter.
    """
    for parameter, name in zip(parameters, names, strict=True):
        if hasattr(parameter, "placements"):
            raise ConfigError(
                f"{name} is a DTensor, sharded already: its optimizer state is too; use the plain "
                "optimizer"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"{name}, shape {tuple(parameter.shape)}, strides {parameter.stride()}, is not "
                "contiguous and cannot be sharded flat; make it so first: "
                "parameter.data = parameter.data.contiguous()"
            )


def check_ranks_agree(layout: Layout, comm: Communicator) -> None:
    """Check that all ranks shard the same parameters in the same order.

    One all-reduce over the whole group, int64 [2], on the CPU, blocking.

    Raises:
        ConfigError: on every rank, when any two differ.
    """
    text = repr([(tuple(p.shape), str(p.dtype)) for p in layout.parameters]) + repr(layout.buckets)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    smallest = torch.tensor([digest, -digest], dtype=torch.int64)
    comm.all_reduce(smallest, "min").wait()
    if smallest[0] != -smallest[1]:
        raise ConfigError(
            f"rank {comm.rank}: the ranks shard different parameters (number, order, shapes, "
            f"dtypes or buckets differ); this rank has {len(layout.parameters)}"
        )
