"""Names that a course on distributed training asks for, over `gs.replicate`.

    ddp_model = get_ddp_bucketed(module, bucket_size_mb=25)
    ddp_bucketed_on_train_batch_start(ddp_model, optimizer)
    loss_fn(ddp_model(inputs), targets).backward()
    ddp_bucketed_on_after_backward(ddp_model, optimizer)       # gradients are means over ranks now
    optimizer.step()

They need a process group that somebody has made. A training script of one's own is shorter with
`gs.replicate(model, sync="bucketed")`, which wraps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradsync.sync.replicate import replicate
from gradsync.sync.sharded_optimizer import ShardedOptimizer


class SynchronisedModule(nn.Module):
    """A module whose gradients become means over ranks.

    Args:
        module: on its device; takes rank 0's weights and buffers.
        sync: a strategy that works in a loop of one's own.
        options: of the strategy.
    """

    def __init__(self, module: nn.Module, *, sync: str, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._sync = replicate(module, sync=sync, **options)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own."""
        return self.module(*inputs, **named)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over ranks; call it before the optimizer's step."""
        self._sync.finish()


def get_ddp_individual_parameters(module: nn.Module) -> SynchronisedModule:
    """Each gradient is all-reduced by itself, while backward goes on."""
    return SynchronisedModule(module, sync="overlap")


def ddp_individual_parameters_on_after_backward(
    ddp_model: SynchronisedModule, optimizer: torch.optim.Optimizer
) -> None:
    """Between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> SynchronisedModule:
    """Gradients are all-reduced in buckets of `bucket_size_mb` (MiB), while backward goes on."""
    return SynchronisedModule(module, sync="bucketed", bucket_mb=bucket_size_mb)


def ddp_bucketed_on_train_batch_start(
    ddp_model: SynchronisedModule, optimizer: torch.optim.Optimizer
) -> None:
    """Before the forward; there is nothing to prepare."""


def ddp_bucketed_on_after_backward(
    ddp_model: SynchronisedModule, optimizer: torch.optim.Optimizer
) -> None:
    """Between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """`optimizer_cls(params, **kwargs)` whose state is spread over the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
