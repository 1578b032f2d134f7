"""Pieces of parameters that may be rounded differently from the whole.

[Note: 16 bits and threads] Torch computes 16-bit elements in fp32 inside vector loops and rounds
them once; the few elements behind the last full vector go through a scalar loop, which rounds after
each operation (`add` with a factor does: SGD, RMSprop, ASGD, weight decay in Adam). On a CPU a
tensor of more than 32,768 elements is divided among the intra-op threads at length / threads, so
such tails lie in the middle of it too, and at other elements in a piece than in the whole. Measured
with torch 2.13, 100,003 elements in two pieces, 4 steps, 2 to 4 threads: in bf16 and fp16 up to 21
elements differ, all of them in such tails, and none with AdamW or a fused optimizer; none with one
thread, and none in fp32 and fp64.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from gradsync.comm.base import Communicator
from gradsync.sync.sharded.bucket import ShardedBucket

log = logging.getLogger("gradsync")

_ONE_THREAD_TAKES = 32_768
"""Elements: torch's grain of work on a CPU (`at::internal::GRAIN_SIZE`)."""


class ThreadWarning:
    """Warns once."""

    def __init__(self) -> None:
        self._said = False

    def say(self, buckets: Sequence[ShardedBucket], comm: Communicator) -> None:
        """Warn, on rank 0, if this number of threads may round a parameter differently: all ranks
        have the same plan."""
        threads = torch.get_num_threads()
        if self._said or threads < 2 or comm.rank != 0:
            return
        parameter = _first_at_risk(buckets, comm.world_size)
        if parameter is not None:
            self._said = True
            log.warning(
                "a %s parameter of shape %s is updated in pieces, with %d intra-op threads: its "
                "last bits can differ from those on another number of ranks; for equal ones take "
                "one thread: gs.init(threads=1) or torch.set_num_threads(1) (said once)",
                parameter.dtype,
                tuple(parameter.shape),
                threads,
            )


def _first_at_risk(buckets: Sequence[ShardedBucket], world_size: int) -> torch.Tensor | None:
    for bucket in buckets:
        first = bucket.parameters[bucket.plan.slots[0].index]  # all have its dtype and device
        if first.dtype not in (torch.bfloat16, torch.float16) or not first.is_cpu:
            continue
        part = bucket.plan.numel // world_size
        for slot in bucket.plan.slots:
            cut = slot.offset // part != (slot.offset + slot.numel - 1) // part
            if cut and slot.numel > _ONE_THREAD_TAKES:
                return bucket.parameters[slot.index]
    return None
