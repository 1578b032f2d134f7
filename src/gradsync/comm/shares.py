"""A length cut into parts that differ by one element at most; no torch."""

from __future__ import annotations


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index`; the first `length % parts` parts have one element more.

    Parts are empty where there are more of them than elements.
    """
    small, larger = divmod(length, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)
