"""The one place for names that torch changes between the releases we support (2.11 to 2.13)."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def ddp_without_buffer_sync() -> dict[str, Any]:
    """The DDP argument that leaves buffers alone in the forward: renamed in torch 2.13."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}
