"""Mean gradients of whole parameters, also where a strategy keeps them in shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.sharded.whole import whole
from gradsync.sync.sharded.zero import ShardedEngine


def whole_gradients(model: nn.Module, reducer: Reducer | None) -> dict[str, Tensor | None]:
    """What the optimizer is about to use, by name; all ranks call it.

    Args:
        model: replicated, or sharded by FSDP2.
        reducer: None for a loop without gradsync.
    """
    if isinstance(reducer, ShardedEngine) and reducer.recipe.shard == "gradients":
        return _from_shards(reducer)
    return {
        name: None if parameter.grad is None else whole(parameter.grad)
        for name, parameter in trainable(model)
    }


def _from_shards(reducer: ShardedEngine) -> dict[str, Tensor | None]:
    """One all-gather per bucket, whole group, its [numel] and dtype; overlaps nothing."""
    names = [name for name, _ in trainable(reducer.model)]
    found: dict[str, Tensor | None] = dict.fromkeys(names)
    for bucket, shard in zip(reducer.buckets, reducer.gradients(), strict=True):
        flat = torch.empty(bucket.plan.numel, dtype=shard.dtype, device=shard.device)
        reducer.comm.all_gather(flat, shard).wait()
        for slot in bucket.plan.slots:
            if reducer._used[slot.index]:
                part = flat[slot.offset : slot.offset + slot.numel]
                found[names[slot.index]] = part.view(reducer.parameters[slot.index].shape)
    return found
