"""What fits into a rank's memory; pure, no torch."""

from __future__ import annotations

from dataclasses import replace

from gradsync.hardware.memory.model import memory_need
from gradsync.hardware.workload import Split, Workload


def shortage_bytes(work: Workload, split: Split, usable_bytes: int) -> int:
    """By how much `usable_bytes` are too few for a rank; 0 when they are enough.

    Raises:
        ConfigError: an unknown strategy.
    """
    return max(memory_need(work, split).total - usable_bytes, 0)


def largest_micro_batch(work: Workload, split: Split, usable_bytes: int) -> int:
    """Sequences of the largest leaf for which `usable_bytes` are enough, 0 when none is.

    The global batch stays: only sizes that divide it, and leave every replica a leaf.

    Args:
        work: its own micro-batch counts only for the global batch.
        split: how it is divided.
        usable_bytes: of one rank.

    Raises:
        ConfigError: an unknown strategy.
    """
    sequences = work.num_leaves * work.micro_batch_size
    for size in range(sequences // split.layout.dp, 0, -1):
        if sequences % size == 0:
            leaves = sequences // size
            asked = replace(work, micro_batch_size=size, num_leaves=leaves)
            if not shortage_bytes(asked, split, usable_bytes):
                return size
    return 0
