"""The samples of an iterable data set, epoch after epoch, and how to come back to one of them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsync.errors import DataError


class Place(NamedTuple):
    """A place between two samples of a stream; the same on every rank."""

    epoch: int
    """Passes over the data set that are complete."""
    taken: int
    """Samples taken of the pass in progress."""
    state: Any = None
    """The data set's own state there, in JSON's types; None where it has none that can be used."""


class StreamSource:
    """An iterator over the samples, which knows its place.

    Args:
        dataset: any iterable; `set_epoch(n)` is called before pass n where it has that.
        num_epochs: passes; None never ends. A pass without a sample ends it in any case.
    """

    def __init__(self, dataset: Any, num_epochs: int | None) -> None:
        self._dataset = dataset
        self._beginning = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        self._begins = True
        """Whether iterating the data set starts a pass, not where a state left off."""
        self._num_epochs = num_epochs
        self._samples: Iterator[Any] | None = None
        self._epoch = self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._num_epochs is None or self._epoch < self._num_epochs:
            if self._samples is None and not self.seek(self._here()):
                raise DataError(f"pass {self._epoch} has fewer than {self._here().taken} samples")
            assert self._samples is not None
            try:
                for sample in self._samples:
                    self._taken += 1
                    return sample
            except BaseException:
                self.close()  # a generator that has raised would look as if it had ended
                raise
            self.close()
            if not self._taken:
                break
            self._epoch, self._taken = self._epoch + 1, 0
        raise StopIteration

    def place(self) -> Place:
        """Where the next sample comes from."""
        save = getattr(self._dataset, "state_dict", None)
        if self._samples is None or save is None or _holds_samples_back(self._dataset):
            return self._here()
        return self._here()._replace(state=save())

    def seek(self, place: Place) -> bool:
        """Go to `place`, by the data set's own state where there is one, else by reading up to it.

        Returns:
            False when the pass has fewer samples.
        """
        self.rewind(place)
        dataset = self._dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(place.epoch)
        if place.state is not None:
            dataset.load_state_dict(place.state)
        elif not self._begins:
            dataset.load_state_dict(self._beginning)
        self._begins = place.state is None
        self._samples = iter(dataset)
        if place.state is None:
            self._taken = sum(1 for _ in islice(self._samples, place.taken))
        return self._taken == place.taken

    def rewind(self, place: Place) -> None:
        """Let the next sample be the one at `place`; it is looked for when it is asked for."""
        self.close()
        self._epoch, self._taken = place.epoch, place.taken

    def close(self) -> None:
        """End the pass in progress, and with it what the data set has opened."""
        samples, self._samples = self._samples, None
        close = getattr(samples, "close", None)
        if close is not None:
            close()

    def _here(self) -> Place:
        return Place(self._epoch, self._taken)


def digest_of(samples: Sequence[Any]) -> str:
    """A name for the content of samples: equal for equal ones in every process.

    Numbers, text, lists and mappings count as JSON writes them; tensors, arrays and images by type,
    shape and CRC-32 of their bytes; other objects by their type alone.
    """
    text = json.dumps(samples, default=_content, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), zlib.crc32(bits.numpy().data)]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value.dtype.str, value.shape, zlib.crc32(value.tobytes())]
    if isinstance(value, bytes | bytearray | memoryview):
        return zlib.crc32(value)
    if hasattr(value, "tobytes"):  # numpy's scalars, images
        return [type(value).__name__, zlib.crc32(value.tobytes())]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return type(value).__name__


def _holds_samples_back(dataset: Any) -> bool:
    """Whether a shuffle buffer of `datasets` is in it: its state does not say what the buffer
    holds, so going on from there would lose samples."""
    links = [getattr(dataset, "_ex_iterable", None)]
    while links:
        link = links.pop()
        if hasattr(link, "buffer_size"):
            return True
        links += [getattr(link, "ex_iterable", None), *getattr(link, "ex_iterables", ())]
        links = [link for link in links if link is not None]
    return False
