"""The fixed tree over leaves: index arithmetic only, no torch.

[Note: The tree] A step's gradient is defined without ranks. Leaf i is micro-batch i of the global
batch. A node (level, index) stands for the leaves `index * 2**level` up to, not including,
`(index + 1) * 2**level`; its value is left child + right child, and a child without leaves is left
out:

    level 2             (2,0) ----------------- (2,1)
    level 1       (1,0) ----- (1,1)                |          6 leaves: 6 and 7 do not exist,
    level 0      0 --- 1     2 --- 3     4 --- 5  (1,2)       so (2,1) is (1,2)

Leaf gradients contain no -0.0 (they are made by `0.0 + g`), nor do sums of such numbers, and for
these x + 0.0 is x bit for bit. So a leaf without a gradient for a parameter may count as zeros or
be left out: same bits. Rank boundaries do not appear, so any number of ranks gives the same sum.

A rank owns consecutive leaves and can finish every node that lies inside of its range; it sends the
largest such nodes, at most 2 log2(leaves) of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gradsync.errors import RunError

TREE_VERSION = 1
"""Part of the numeric fingerprint: another tree gives other bits."""

UNKNOWN = -1
"""Placeholder for the index of a leaf that the caller did not give."""

FORGOTTEN = -2
"""Placeholder for the index of the first leaf of a rank that discards the step."""

Node = tuple[int, int]
"""(level, index)."""


Pair = tuple[int, int]
"""(left, right): add operand `right` to operand `left`."""


class LeafStack:
    """Folds leaves, arriving in order, into the largest finished nodes: a binary counter.

    `nodes` is in leaf order; node k is in the caller's slot k.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def push(self, leaf: int) -> int:
        """Add leaf number `leaf`; returns the slot of the node that it finishes.

        The caller adds the leaf to slot `len(nodes)` - 1 as it was before, that slot to the one
        below and so on, down to the returned slot; if that is `len(nodes)`, it just stays there.
        """
        level, index = 0, leaf
        while self.nodes and index % 2 == 1 and self.nodes[-1] == (level, index - 1):
            self.nodes.pop()
            level, index = level + 1, index // 2
        self.nodes.append((level, index))
        return len(self.nodes) - 1


def largest_nodes(leaves: range) -> list[Node]:
    """The largest nodes that lie inside of `leaves`, in leaf order."""
    stack = LeafStack()
    for leaf in leaves:
        stack.push(leaf)
    return stack.nodes


def shares(counts: Sequence[int]) -> list[range]:
    """Each rank's leaves, from the number of each rank: consecutive in rank order."""
    edges = [0, *accumulate(counts)]
    return [range(first, last) for first, last in pairwise(edges)]


def checked_shares(told: Sequence[tuple[int, int]]) -> list[range]:
    """Each rank's leaves, from (number, index of the first or `UNKNOWN`) of each rank.

    Raises:
        RunError: a first leaf that does not follow those of the rank below.
    """
    ranges = shares([count for count, _ in told])
    for rank, (leaves, (_, first)) in enumerate(zip(ranges, told, strict=True)):
        if first not in (UNKNOWN, leaves.start):
            raise RunError(
                f"rank {rank}'s first leaf is {first}, but the ranks below "
                f"it have leaves 0..{leaves.start - 1}: leaves must follow each other in rank "
                "order without gaps (as gs.loader deals them)"
            )
    return ranges


def merges_of(nodes: Sequence[Node], wanted: Sequence[Node]) -> tuple[list[Pair], list[int]]:
    """Plan how to add `nodes` (in leaf order, slot k holding nodes[k]) up to the `wanted` ones.

    Returns:
        The additions in a valid order of execution, and the slot in which each wanted node ends; -1
            for a node without leaves.
    """
    merges: list[Pair] = []

    def value(level: int, index: int, first: int, last: int) -> int:
        """Slot that will hold node (level, index), made of slots first .. last-1."""
        if last == first:
            return -1
        if last == first + 1:
            return first
        middle = first
        while middle < last and _start(nodes[middle]) < (2 * index + 1) << (level - 1):
            middle += 1
        left = value(level - 1, 2 * index, first, middle)
        right = value(level - 1, 2 * index + 1, middle, last)
        if left >= 0 and right >= 0:
            merges.append((left, right))
        return left if left >= 0 else right

    slots, first = [], 0
    for level, index in wanted:
        end, last = (index + 1) << level, first
        while last < len(nodes) and _start(nodes[last]) < end:
            last += 1
        slots.append(value(level, index, first, last))
        first = last
    assert first == len(nodes), "every node must lie below a wanted one"
    return merges, slots


def root(num_leaves: int) -> Node:
    """The node above all leaves."""
    return (max(num_leaves - 1, 0).bit_length(), 0)


def _start(node: Node) -> int:
    return node[1] << node[0]


@dataclass(frozen=True, slots=True)
class SumPlan:
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


def plan_sum(told: Sequence[tuple[int, int]]) -> SumPlan:
    """Plan the sum along the tree; with one leaf a rank, a balanced tree over ranks.

    A rank has a buffer for each of its largest nodes, or for each leaf where indices are unknown.

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
    return SumPlan(tuple(operands), tuple(merges), ends[0])
