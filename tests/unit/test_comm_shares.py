"""Shares cover a length once, in order, and differ by one at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.comm.shares import share


@given(length=st.integers(0, 1000), parts=st.integers(1, 50))
def test_shares_cover_everything_once(length: int, parts: int) -> None:
    found = [share(length, parts, i) for i in range(parts)]
    assert [i for start, end in found for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in found]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
