"""This rank's parts of whole tensors, for a checkpoint that stores them separately.

Every share is a run of elements, row after row, as are the pieces of flat buckets and a DTensor's
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from gradsync.sync.sharded.bucket import ShardedBucket
from gradsync.sync.sharded.state import State, not_elementwise
from gradsync.sync.sharded.whole import shaped_as

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The elements of one whole tensor that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """First element of the flattened tensor."""
    stop: int
    """Element behind the last one."""
    saves: bool = True
    """False where another rank holds the same elements and saves them."""

    @property
    def saves_numbers(self) -> bool:
        """Whether this one share saves the numbers that are equal in all shares of the tensor."""
        return self.saves and self.start == 0


HeldState = dict[Any, tuple[Share, State]]
"""Parameter -> this rank's share of it, and the optimizer state there: tensors of elements are
flat. A parameter without state yet has {}."""


def whole_share(tensor: Tensor, rank: int) -> Share:
    """The share of a tensor that every rank has whole: rank 0 saves it."""
    return Share(shape=tuple(tensor.shape), start=0, stop=tensor.numel(), saves=rank == 0)


def share_of_rows(tensor: Tensor, rank: int, world_size: int) -> Share:
    """The share of a tensor that FSDP2 cut along its first dimension, as `torch.chunk` would: the
    first ranks have ceil(rows / ranks) rows, the last ones fewer or none.

    Args:
        tensor: a parameter or its state; a plain tensor is a whole share.
        rank: this rank.
        world_size: number of ranks.
    """
    if not isinstance(tensor, DTensor):
        return whole_share(tensor, rank)
    assert tuple(tensor.placements) == (Shard(0),), "rows alone are contiguous"
    rows, row, held = tensor.shape[0], prod(tensor.shape[1:]), tensor.to_local().numel()
    start = min(rank * -(-rows // world_size), rows) * row
    return Share(
        shape=tuple(tensor.shape), start=start, stop=start + held, saves=held > 0 or rank == 0
    )


def sharded_state_dict(
    buckets: Iterable[ShardedBucket], others: Mapping[Tensor, State], rank: int
) -> HeldState:
    """This rank's pieces of the state, sharing the optimizer's tensors.

    Args:
        buckets: of the sharded optimizer.
        others: whole state of its parameters that are in no bucket.
        rank: this rank.

    Raises:
        ConfigError: names state that is neither elementwise nor a single number.
    """
    found: HeldState = {
        parameter: (whole_share(parameter, rank), flat_state(state, parameter))
        for parameter, state in others.items()
    }
    for bucket in buckets:
        states = {} if bucket.inner is None else bucket.inner.state
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            parameter = bucket.parameters[piece.index]
            share = Share(shape=tuple(parameter.shape), start=piece.start, stop=piece.stop)
            found[parameter] = share, flat_state(states.get(tensor, {}), tensor)
    return found


def load_sharded_state_dict(
    buckets: Sequence[ShardedBucket], states: Mapping[Any, State]
) -> dict[Any, State]:
    """Restore pieces from `sharded_state_dict`; the buckets' previous state is dropped.

    Returns:
        the state of parameters in no bucket, in their shapes.
    """
    covered: set[int] = set()
    for bucket in buckets:
        covered |= {id(bucket.parameters[slot.index]) for slot in bucket.plan.slots}
        if bucket.inner is None:
            continue
        bucket.inner.state.clear()
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            if state := states.get(bucket.parameters[piece.index]):
                bucket.inner.state[tensor] = dict(state)
    return {
        parameter: {name: shaped_as(value, parameter) for name, value in state.items()}
        for parameter, state in states.items()
        if state and id(parameter) not in covered
    }


def flat_state(state: Mapping[str, Any], like: Tensor) -> State:
    """Tensors of elements flattened, sharing memory; other values unchanged.

    Raises:
        ConfigError: see `sharded_state_dict`.
    """
    return {name: _flat(name, value, like) for name, value in state.items()}


def _flat(name: str, value: Any, like: Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == like.shape:
        return (value.to_local() if isinstance(value, DTensor) else value.detach()).reshape(-1)
    if value.dim() == 0:
        return value
    raise not_elementwise(name, value.shape, like.shape)
