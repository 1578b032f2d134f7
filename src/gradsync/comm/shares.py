"""Division of a length into parts that differ by one element at most; no torch."""

from __future__ import annotations


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of one part; parts are empty where there are more of them than elements.

    Args:
        length: elements in all.
        parts: number of parts; the first `length % parts` have one element more.
        index: which part, from 0.
    """
    small, larger = divmod(length, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)
