"""Operations of two ranks on pages in this process: one rank that runs far ahead of its peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gradsync.comm.shared_memory.ordered_ops import (
    NUM_SIGNATURES,
    PAGE_BYTES,
    Flags,
    OrderedOp,
    OrderedOps,
    Patience,
)
from gradsync.errors import RunError

MANY = 2 * NUM_SIGNATURES + 50


class Page:
    """A rank's own page: `after(store)` runs between any two of its stores."""

    def __init__(self, words: Any, after: Callable[[int], None]) -> None:
        self.words, self.after, self.stores = words, after, 0

    def __setitem__(self, place: int, value: int) -> None:
        self.words[place] = value
        self.stores += 1
        self.after(self.stores)


def two_ranks() -> tuple[OrderedOps, OrderedOps, Flags]:
    """The turns of both, and the second one's flags."""
    pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
    first, second = (Flags(rank, pages) for rank in range(2))
    patience = Patience(0, [os.getpid()] * 2, 1.0)
    return OrderedOps(first, patience), OrderedOps(second, patience), second


def go_on(turns: OrderedOps) -> bool:
    """Carry them as far as the peer allows; whether anything moved."""
    before = len(turns._queue)
    while turns._queue and turns._go_on(turns._queue[0], waiting=False):
        turns._queue.popleft()
    return len(turns._queue) < before


@pytest.mark.parametrize("from_store", [1, *range(2 * NUM_SIGNATURES, 2 * NUM_SIGNATURES + 5)])
def test_a_rank_far_ahead_is_not_accused(from_store: int) -> None:
    """The slow one looks after each store of the fast one, from the given store on: an arrival is
    two stores, and the slot of the first turn comes again after NUM_SIGNATURES arrivals."""
    slow, fast, flags = two_ranks()
    done: list[list[int]] = [[], []]
    for number in range(MANY):
        slow.submit(OrderedOp("the same", (number,), share=partial(done[0].append, number)))

    def look(store: int) -> None:
        if store >= from_store:
            go_on(slow)

    flags._mine = Page(flags._mine, look)  # pyrefly: ignore[bad-assignment]
    for number in range(MANY):
        fast.submit(OrderedOp("the same", (number,), share=partial(done[1].append, number)))
    while any([go_on(fast), go_on(slow)]):
        pass
    assert done == [list(range(MANY))] * 2


def test_another_operation_is_found_however_far_ahead_its_rank_is() -> None:
    slow, fast, _ = two_ranks()
    fast.submit(OrderedOp("another thing"))
    for _ in range(MANY):
        fast.submit(OrderedOp("the same"))
    with pytest.raises(RunError, match=r"different operations.* one thing"):
        slow.submit(OrderedOp("one thing"))
