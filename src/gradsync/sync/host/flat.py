"""The gradients (and weights) of one dtype as one flat buffer per rank, seen by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.host.runs import blocks_of, runs_of, share_blocks

if TYPE_CHECKING:
    from torch import Tensor


class Flat:
    """All buckets of one dtype, concatenated.

    Args:
        comm: the ranks of the host.
        buckets: of one dtype; their buffers move into shared memory.
    """

    def __init__(self, comm: SharedMemoryCommunicator, buckets: Sequence[Bucket]) -> None:
        self.comm = comm
        self.buckets = list(buckets)
        self.dtype = buckets[0].dtype
        self.starts, numel = [], 0
        for bucket in buckets:
            self.starts.append(numel)
            numel += bucket.plan.numel
        self.numel = numel
        self.slots = [
            replace(slot, offset=slot.offset + start)
            for bucket, start in zip(buckets, self.starts, strict=True)
            for slot in bucket.plan.slots
        ]
        """Places of the parameters, in order."""
        shares = share_blocks(blocks_of(self.slots), comm.world_size)
        self.blocks = shares[comm.rank]
        self.runs = list(runs_of(self.blocks))
        """Runs of this rank."""
        self.gradients: list[list[Tensor]] = []
        """Buffer number -> rank -> [numel]."""

    @property
    def mine(self) -> slice:
        """Elements of this rank."""
        return slice(self.runs[0].start, self.runs[-1].stop) if self.runs else slice(0, 0)

    def ensure(self, count: int) -> None:
        """Allocate gradient buffers until each rank has `count`; all ranks call it.

        Raises:
            SharedMemoryError: on all ranks, when there is too little memory.
        """
        while len(self.gradients) < count:
            number = len(self.gradients)
            memory = self.comm.allocate(self.numel, self.dtype)
            parts = self.comm.parts_of(memory)
            assert parts is not None, "allocated just now"
            self.comm.release(memory)  # it lives as long as this rank refers to it
            self.gradients.append(parts)
            for bucket, start in zip(self.buckets, self.starts, strict=True):
                bucket.adopt(number, memory[start : start + bucket.plan.numel])


def flats_of(comm: SharedMemoryCommunicator, buckets: Sequence[Bucket]) -> list[Flat]:
    """One `Flat` per dtype, in order of first appearance."""
    by_dtype: dict[torch.dtype, list[Bucket]] = {}
    for bucket in buckets:
        by_dtype.setdefault(bucket.dtype, []).append(bucket)
    return [Flat(comm, group) for group in by_dtype.values()]
