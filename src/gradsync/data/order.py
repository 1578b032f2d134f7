"""Which sample stands at which place of the endless stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradsync.data.permutation import derive_key, permute
from gradsync.errors import DataError


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The stream of dataset indices: epoch after epoch, each with its own permutation.

    Position p belongs to epoch `p // num_samples`. Epochs advance by themselves; there is no
    `set_epoch` to forget.

    Raises:
        DataError: when there are no samples.
    """

    num_samples: int
    """Samples in the data set."""
    seed: int
    """Together with the epoch, names the permutation."""
    shuffle: bool = True
    """False keeps the order of the data set in every epoch."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the data set has no samples")

    def indices(self, start: int, count: int) -> np.ndarray:
        """Dataset indices of stream positions `start .. start+count-1`.

        The range may cross the end of one or more epochs.

        Returns:
            int64 array, shape [count].
        """
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative; got {start} and {count}")
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.num_samples)
            here = min(count, self.num_samples - offset)
            positions = np.arange(offset, offset + here, dtype=np.int64)
            parts.append(self._of_epoch(epoch, positions))
            start, count = start + here, count - here
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _of_epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return positions
        return permute(positions, self.num_samples, derive_key(self.seed, epoch))
