"""The one place for names that torch changes between the releases we support (2.11 to 2.13)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def ddp_without_buffer_sync() -> dict[str, Any]:
    """The DDP argument that leaves buffers alone in the forward: renamed in torch 2.13."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def regroup_ddp_buckets(ddp: DistributedDataParallel) -> None:
    """What DDP's forward does after the first synchronised backward; private in torch."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def active_ddp() -> DistributedDataParallel | None:
    """The DDP whose forward runs now; private in torch."""
    return DistributedDataParallel._active_ddp_module


def optimizer_pre_hooks() -> list[Callable[..., Any]]:
    """What is to be called before any optimizer's step; private in torch."""
    return list(_global_optimizer_pre_hooks.values())


def optimizer_post_hooks() -> list[Callable[..., Any]]:
    """What is to be called after any optimizer's step; private in torch."""
    return list(_global_optimizer_post_hooks.values())


def current_graph_task() -> int:
    """Number of the backward that runs now; inner ones have higher numbers. Private in torch."""
    return torch._C._current_graph_task_id()


def at_the_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once the backward that runs now has finished; only inside of a hook.

    Private in torch, and what its own DDP and FSDP use.
    """
    Variable._execution_engine.queue_callback(callback)  # pyrefly: ignore
