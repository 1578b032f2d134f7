"""The limit of ranks that share a host's memory: the bytes that must move, at the speed of a copy.

The speed is measured beside the operations, with all ranks busy at once: each one copies between
two buffers of its own, of the operation's size. No torch.

[Note: Least bytes] What the busiest of W ranks must at least read and write, for a tensor of S
bytes, when every rank's buffer can be reached by all and nothing is copied on the way:

    all_reduce       its share S/W of W buffers is read, and written into W buffers      2 S
    reduce_scatter   its share of W buffers is read, and written once              S + S/W
    all_gather       W parts of S/W are read and written                                 2 S
    broadcast        S is read and written                                               2 S

The processor's caches count: W ranks that copy hold 2 W S bytes, W ranks that all-reduce W S. Where
the one fits and the other does not, an operation passes its limit.
"""

from __future__ import annotations


def copied_bytes(size_bytes: int) -> int:
    """What a copy of `size_bytes` moves: each byte is read and written."""
    return 2 * size_bytes


def least_bytes(operation: str, size_bytes: int, world_size: int) -> float:
    """What the busiest rank must at least read and write; see [Note: Least bytes]."""
    if operation == "reduce_scatter":
        return size_bytes + size_bytes / world_size
    return 2 * size_bytes


def limit_s(operation: str, size_bytes: int, world_size: int, copy_s: float) -> float:
    """The least time of an operation, seconds, where all ranks at once copy `size_bytes` within
    `copy_s`."""
    return copy_s * least_bytes(operation, size_bytes, world_size) / copied_bytes(size_bytes)
