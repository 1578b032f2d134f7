"""From sample indices to a collated batch, and from a data set to its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, default_collate

from gradsync.errors import DataError


class BatchReader(Dataset[Any]):
    """Reads whole leaves: index it with the indices of a leaf, get the batch.

    The same object works in this process and in DataLoader workers, so both give the same batch.
    A data set may offer `read_batch(indices) -> batch` (as `TokenDataset` does) or torch's
    `__getitems__(indices) -> list of samples`; else samples are read one by one.

    Args:
        dataset: a map-style data set.
        collate_fn: list of samples to batch; None is torch's `default_collate`, or the data set's
            own `read_batch`.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn or default_collate
        self._whole = collate_fn is None and hasattr(dataset, "read_batch")

    def __getitem__(self, index: np.ndarray) -> Any:
        if self._whole:
            return self._dataset.read_batch(index)
        numbers = index.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate_fn(self._dataset.__getitems__(numbers))
        return self._collate_fn([self._dataset[number] for number in numbers])


def size_of(dataset: Any) -> int:
    """Number of samples.

    Raises:
        DataError: when the data set is not map-style.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader makes batches of its own: pass its data set (dataloader.dataset); "
            "num_workers and collate_fn are arguments here, too"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        names = ", ".join(map(repr, dataset))
        raise DataError(f"a dict of data sets ({names}): pass one of them, as in data['train']")
    if isinstance(dataset, type):
        raise DataError(f"{dataset.__name__} is a class: pass an object, {dataset.__name__}(...)")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no __len__ and __getitem__; "
            "iterable data sets go through stream_loader"
        )
    return len(dataset)


def fingerprint_of(dataset: Any) -> str:
    """A name for the data set's content, as well as it can be known: class, length, and its own
    `fingerprint` (else `_fingerprint`, as Hugging Face data sets have), as far as it has them.

    Where neither says enough, or it changes for no reason, assign `dataset.fingerprint`.
    """
    parts = [type(dataset).__name__]
    if hasattr(dataset, "__len__"):
        parts.append(str(len(dataset)))
    for name in ("fingerprint", "_fingerprint"):
        value = getattr(dataset, name, None)
        if isinstance(value, str):
            return ":".join([*parts, value])
    return ":".join(parts)
