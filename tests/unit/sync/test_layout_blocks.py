"""Shares of the host step: every element has one owner, cut where a block of the norm ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.sync.buckets import UNKNOWN, plan_sum
from gradsync.sync.layout import BLOCK, Slot, blocks_of, runs_of, share_blocks

sizes = st.lists(st.integers(0, 3 * BLOCK), max_size=12)


def slots_of(numels: list[int]) -> list[Slot]:
    offset, slots = 0, []
    for index, numel in enumerate(numels):
        slots.append(Slot(index=index, offset=offset, numel=numel))
        offset += -(-numel // 64) * 64
    return slots


@given(sizes, st.integers(1, 9))
def test_every_element_is_in_one_block_of_one_rank(numels: list[int], world_size: int) -> None:
    slots = slots_of(numels)
    shares = share_blocks(blocks_of(slots), world_size)
    assert len(shares) == world_size
    for slot in slots:
        blocks = [b for share in shares for b in share if b.index == slot.index]
        starts = [block.start for block in blocks]
        stops = [block.stop for block in blocks]
        if slot.numel:
            assert starts == [slot.offset, *stops[:-1]]
            assert stops[-1] == slot.offset + slot.numel
        else:
            assert not blocks
        assert [block.number for block in blocks] == list(range(len(blocks)))
        assert all((start - slot.offset) % BLOCK == 0 for start in starts)


@given(sizes, st.integers(2, 5))
def test_shares_differ_by_little(numels: list[int], world_size: int) -> None:
    shares = share_blocks(blocks_of(slots_of(numels)), world_size)
    total = sum(numels)
    for share in shares:
        work = sum(block.stop - block.start for block in share)
        assert abs(work - total / world_size) <= BLOCK + 64 * len(numels)


@given(sizes)
def test_runs_hold_the_blocks_in_order_and_fit_the_cache(numels: list[int]) -> None:
    blocks = blocks_of(slots_of(numels))
    runs = list(runs_of(blocks))
    assert [block for run in runs for block in run.blocks] == blocks
    for run in runs:
        assert (run.start, run.stop) == (run.blocks[0].start, run.blocks[-1].stop)
        assert run.stop - run.start <= BLOCK


def test_a_buffer_of_each_rank() -> None:
    found = plan_sum([(1, UNKNOWN)] * 3)
    assert found.operands == ((0, 0), (1, 0), (2, 0))
    assert (found.pairs, found.end, found.num_buffers) == (((0, 1), (0, 2)), 0, 1)


@pytest.mark.parametrize(
    ("told", "operands", "pairs", "end"),
    [
        # one leaf a rank: (0 + 1) + (2 + 3)
        ([(1, 0), (1, 1), (1, 2), (1, 3)], 4, ((0, 1), (2, 3), (0, 2)), 0),
        # 3 + 2 leaves: rank 0 brings (0 1) and 2, rank 1 brings 3 and 4
        ([(3, 0), (2, 3)], 4, ((1, 2), (0, 1), (0, 3)), 0),
        # no rank said which ones: every leaf comes alone
        ([(3, UNKNOWN), (2, UNKNOWN)], 5, ((0, 1), (2, 3), (0, 2), (0, 4)), 0),
        # a rank without leaves brings nothing
        ([(2, 0), (0, UNKNOWN), (2, 2)], 2, ((0, 1),), 0),
        ([(0, UNKNOWN), (0, UNKNOWN)], 0, (), -1),
    ],
)
def test_what_is_added_along_the_tree(
    told: list[tuple[int, int]], operands: int, pairs: tuple[tuple[int, int], ...], end: int
) -> None:
    found = plan_sum(told)
    assert (len(found.operands), found.pairs, found.end) == (operands, pairs, end)
    assert list(found.operands) == sorted(found.operands)
