"""Mean gradients of whole parameters, also where a strategy keeps them in shards."""

from __future__ import annotations

from torch import Tensor, nn

from gradsync.sync.host.engine import HostEngine
from gradsync.sync.reducer import Reducer, trainable
from gradsync.sync.sharded.whole import whole
from gradsync.sync.sharded.zero import ShardedEngine


def whole_gradients(model: nn.Module, reducer: Reducer | None) -> dict[str, Tensor | None]:
    """What the optimizer is about to use, by name; all ranks call it.

    Args:
        model: replicated, or sharded by FSDP2.
        reducer: None for a loop without gradsync.
    """
    names = [name for name, _ in trainable(model)]
    if isinstance(reducer, ShardedEngine | HostEngine):
        return dict(zip(names, reducer.whole_gradients(), strict=True))
    return {
        name: None if parameter.grad is None else whole(parameter.grad)
        for name, parameter in trainable(model)
    }
