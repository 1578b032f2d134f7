"""A yardstick for ranks that share a host's memory: the least bytes that an operation must move, at
the rate at which a plain copy moves its own.

The rate is measured beside the operations, with all ranks busy at once: each one copies between
two buffers of its own, of the operation's size. No torch.

[Note: Least bytes] What the busiest of W ranks must at least read and write, for a tensor of S
bytes, when every rank's buffer can be reached by all and nothing is copied on the way:

    all_reduce       its share S/W of W buffers is read, and written into W buffers      2 S
    reduce_scatter   its share of W buffers is read, and written once              S + S/W
    all_gather       W parts of S/W are read and written                                 2 S
    broadcast        S is read and written                                               2 S

[Note: Beyond the limit] It is a yardstick rather than a bound, and an operation may pass it:

- A processor that writes to memory first reads the line that it writes to, unless it is in a cache
  already. A copy's destination is not: of S bytes it moves 3 S, and counts as 2 S. An operation in
  place has just read what it writes, and moves no more than it counts. So a pass in place reaches
  up to 150 % of the rate of a copy: all_reduce can.
- Caches: W ranks that copy hold 2 W S bytes, W ranks that all-reduce W S. Where the one is too much
  and the other fits, the copy goes to memory and the operation does not.
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
    """The time of an operation at the rate of a copy, seconds, where all ranks at once copy
    `size_bytes` within `copy_s`; see [Note: Beyond the limit]."""
    return copy_s * least_bytes(operation, size_bytes, world_size) / copied_bytes(size_bytes)
