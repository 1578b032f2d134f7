"""The function that DDP calls for each bucket, and its state in between."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Average = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
"""`average(group, bucket)`: a future of the bucket's buffer, averaged over the group in place."""


class HookState:
    """State of a hook between buckets. One state belongs to one DDP model.

    Args:
        group: process group; None is torch's default one, when the first bucket comes.
        average: averages a bucket.
    """

    def __init__(self, group: Any, average: Average) -> None:
        self.group = group
        self.average = average


def average_bucket(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook itself, for `DistributedDataParallel.register_comm_hook`."""
    return state.average(state.group or dist.group.WORLD, bucket)
