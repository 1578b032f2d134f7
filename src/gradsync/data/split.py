"""Which documents are held out for validation: decided by content, not by order."""

from __future__ import annotations

import numpy as np

FEWEST_DOCUMENTS = 20
"""Below this, whole documents are too coarse and the tail of the tokens is held out instead."""


def choose_validation(hashes: np.ndarray, val_fraction: float) -> np.ndarray | None:
    """Mark the documents with the smallest content hashes, `val_fraction` of them and at least one.

    The choice does not change with the order of the documents, and equal documents go the same
    way, so none is both trained on and validated with.

    Args:
        hashes: one uint64 content hash a document.
        val_fraction: share of the documents to hold out, above 0.

    Returns:
        bool array, True for validation; or None when documents cannot be split (too few, or all
        the same).
    """
    if len(hashes) < FEWEST_DOCUMENTS:
        return None
    count = max(1, round(len(hashes) * val_fraction))
    held_out = hashes <= np.partition(hashes, count - 1)[count - 1]
    return None if held_out.all() else held_out
