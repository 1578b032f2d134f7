"""Operands of a step on all ranks of a host, and the order of their additions: pure.

Without the tree each rank has one buffer. Along the tree ([Note: The tree] in leaf_tree.py) it has
its largest nodes, or its single leaves where their indices are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.comm.kernels import Pair, pairs_of_tree
from gradsync.sync.engine.leaf_tree import (
    UNKNOWN,
    Node,
    checked_shares,
    largest_nodes,
    merges_of,
    root,
)


@dataclass(frozen=True, slots=True)
class Sum:
    """Plan of a sum: the buffers that are added, along which pairs, and where the sum ends."""

    operands: tuple[tuple[int, int], ...]
    """(rank, buffer number on that rank)."""
    pairs: tuple[Pair, ...]
    """Pairs of operands, in a valid order of execution."""
    end: int
    """The operand that then holds the sum; -1: no rank had a leaf."""

    @property
    def num_buffers(self) -> int:
        """Largest number of buffers of any rank."""
        return max((number + 1 for _, number in self.operands), default=1)


def sum_of_ranks(world_size: int) -> Sum:
    """Sum of one buffer per rank."""
    operands = tuple((rank, 0) for rank in range(world_size))
    return Sum(operands, tuple(pairs_of_tree(world_size)), 0)


def sum_of_leaves(told: Sequence[tuple[int, int]]) -> Sum:
    """Sum along the tree.

    Args:
        told: (number of leaves, index of the first or `UNKNOWN`) of each rank.

    Raises:
        RunError: see `checked_shares`.
    """
    ranges = checked_shares(told)
    brought: list[list[Node]] = [
        [(0, leaf) for leaf in leaves] if first == UNKNOWN else largest_nodes(leaves)
        for leaves, (_, first) in zip(ranges, told, strict=True)
    ]
    operands = [(rank, k) for rank, nodes in enumerate(brought) for k in range(len(nodes))]
    nodes = [node for of_rank in brought for node in of_rank]
    merges, ends = merges_of(nodes, [root(ranges[-1].stop)])
    return Sum(tuple(operands), tuple((m.left, m.right) for m in merges), ends[0])
