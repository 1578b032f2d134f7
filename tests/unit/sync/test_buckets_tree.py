"""The fixed tree: every way of sharing its leaves gives the same expression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.sync.buckets import (
    UNKNOWN,
    Node,
    checked_shares,
    largest_nodes,
    merges_of,
    push_leaf,
    root,
)

Expression = int | tuple["Expression", "Expression"]
"""A leaf's number, or the sum of two expressions."""

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def shares(counts: list[int]) -> list[range]:
    return checked_shares([(count, UNKNOWN) for count in counts])


def definition(first: int, last: int) -> Expression:
    """Sum of leaves `first` .. `last - 1` of a node, from the picture: left half + right half.

    `first` is where the node begins; its width is the power of two that covers the leaves.
    """
    if last - first == 1:
        return first
    half = 1 << ((last - first - 1).bit_length() - 1)
    return (definition(first, first + half), definition(first + half, last))


def add_up(
    values: list[Expression], nodes: Sequence[Node], wanted: Sequence[Node]
) -> list[Expression | None]:
    """Carry out `merges_of`, as the transport does with tensors."""
    merges, ends = merges_of(nodes, wanted)
    values = list(values)
    for left, right in merges:
        values[left] = (values[left], values[right])
    return [None if end < 0 else values[end] for end in ends]


def fold(leaves: range) -> tuple[list[Node], list[Expression]]:
    """Carry out `push_leaf`, as a rank's own sums do with buffers."""
    nodes, slots = [], []
    for leaf in leaves:
        top = len(nodes)
        slots.append(leaf)
        for number in range(top, push_leaf(nodes, leaf), -1):
            slots[number - 1] = (slots[number - 1], slots.pop())
    return nodes, slots


def edges(node: Node) -> tuple[int, int]:
    level, index = node
    return index << level, (index + 1) << level


def test_the_definition_is_the_picture() -> None:
    assert definition(0, 6) == (((0, 1), (2, 3)), (4, 5))
    assert definition(0, 7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert definition(0, 1) == 0


@given(COUNTS)
def test_any_shares_give_the_same_expression(counts: list[int]) -> None:
    """Folded on ranks leaf by leaf, or kept apart until the counts are known: the same tree."""
    total = sum(counts)
    folded_nodes, folded_values = [], []
    kept_nodes, kept_values = [], []
    for leaves in shares(counts):
        nodes, values = fold(leaves)
        folded_nodes += nodes
        folded_values += values
        singles = [(0, leaf) for leaf in leaves]
        kept_nodes += largest_nodes(leaves)
        kept_values += add_up(list(leaves), singles, largest_nodes(leaves))
    expected = definition(0, total) if total else None
    assert add_up(folded_values, folded_nodes, [root(total)]) == [expected]
    assert (kept_nodes, kept_values) == (folded_nodes, folded_values)


@given(COUNTS, st.integers(1, 4))
def test_two_stages_give_the_same_expression(counts: list[int], ranks_a_host: int) -> None:
    counts += [0] * (-len(counts) % ranks_a_host)
    hosts = [counts[i : i + ranks_a_host] for i in range(0, len(counts), ranks_a_host)]
    ranges = shares([sum(host) for host in hosts])
    nodes, values, start = [], [], 0
    for host, leaves in zip(hosts, ranges, strict=True):
        here_nodes, here_values = [], []
        for count in host:
            rank_nodes, rank_values = fold(range(start, start + count))
            here_nodes += rank_nodes
            here_values += rank_values
            start += count
        nodes += largest_nodes(leaves)
        values += add_up(here_values, here_nodes, largest_nodes(leaves))
    expected = definition(0, start) if start else None
    assert add_up(values, nodes, [root(start)]) == [expected]


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_largest_nodes(first: int, count: int) -> None:
    """They cover the leaves in order, none could be larger, and they are few."""
    leaves = range(first, first + count)
    nodes = largest_nodes(leaves)
    spans = [edges(node) for node in nodes]
    assert spans[0][0] == leaves.start
    assert spans[-1][1] == leaves.stop
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    for level, index in nodes:
        parent = edges((level + 1, index // 2))
        assert parent[0] < leaves.start or parent[1] > leaves.stop
    if count > 1:
        assert len(nodes) <= 2 * math.log2(count)


@given(st.integers(0, 300), st.integers(0, 60))
def test_the_stack_holds_the_largest_nodes_at_any_time(first: int, count: int) -> None:
    nodes = []
    for leaf in range(first, first + count):
        before = list(nodes)
        slot = push_leaf(nodes, leaf)
        assert slot == len(nodes) - 1
        assert nodes[:-1] == before[:slot], "nodes below the new one stay where they are"
        assert nodes == largest_nodes(range(first, leaf + 1))


def test_a_node_that_nobody_wants_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="below a wanted one"):
        merges_of([(0, 0), (0, 9)], [(1, 0)])
