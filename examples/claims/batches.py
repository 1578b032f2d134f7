"""Batch arithmetic as it is published, worked out.

python examples/claims/batches.py
"""

from collections.abc import Sequence
from itertools import product

import torch

from gradsync.compat import shard_batch


def effective(micro_batch: int, steps: int, ranks: int) -> int:
    """The global batch that the published formula ends with."""
    share = micro_batch // ranks
    if share == 0:
        share, steps = 1, micro_batch * steps // ranks
    return share * steps * ranks


def changed(micro_batches: Sequence[int], ranks: Sequence[int]) -> str:
    """In how many cases that is not the global batch which was asked for."""
    cases = list(product(micro_batches, [1, 2, 4, 8, 16], ranks))
    return f"{sum(effective(m, s, w) != m * s for m, s, w in cases):,} of {len(cases):,} cases"


powers = [2, 4, 8, 16, 32]
print(f"not the batch asked for: {changed(range(1, 65), [*powers, 3, 5, 6, 7, 12, 24])}")
print(f"with powers of two only: {changed([1, 2, 4, 8, 16, 32, 64], powers)}")
print(f"6 x 2 on 4 ranks: {effective(6, 2, 4)}; 12 x 4 on 8: {effective(12, 4, 8)}")
leaves = 2**19 // (4 * 2048)
print(f"forward passes for 2^19 tokens: {leaves} on one rank, {leaves // 4} on each of 4")
print(f"batch 32 a rank, 4 ranks, 2 micro-batches: {32 * 4 * 2} samples in a step")
print(f"steps in an epoch of 1,280, batch 32 a rank: {1280 // 32} alone, {1280 // 128} on 4 ranks")
print(f"i % 4 == 0 steps after micro-batch {next(i for i in range(9) if i % 4 == 0) + 1} of 4")
parts = [len(shard_batch((torch.zeros(50),), rank, 4)[0]) for rank in range(4)]
print(f"50 samples over 4 ranks: {parts}")
print(f"2 hosts of 4 GPUs: cuda:RANK exists for {sum(rank < 4 for rank in range(8))} of 8 ranks")
