"""The sample at each place of the endless stream, a pure function of (seed, epoch, position): a
pseudo-random permutation of `range(n)` for each epoch, never stored as a list.

A Feistel network permutes the smallest power of two that holds n (fewer than 2n values). Values
that land outside are sent through again until they land inside ("cycle-walking"), which keeps the
map one-to-one. Both ideas: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
https://eprint.iacr.org/2001/012. The round function is the SplitMix64 finaliser (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014).

Only unsigned 64-bit integer arithmetic is used, so the order is the same on every platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradsync.errors import DataError

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_NUM_ROUNDS = 8
"""Even, so that the two halves end with their initial widths."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The stream of dataset indices: epoch after epoch, each with its own permutation.

    Position p belongs to epoch `p // num_samples`. Epochs advance by themselves, without
    `set_epoch`. Raises DataError without samples.
    """

    num_samples: int
    """Samples in the data set."""
    seed: int
    """Determines the permutation, together with the epoch."""
    shuffle: bool = True
    """False keeps the order of the data set in every epoch."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the data set has no samples")

    def indices(self, start: int, count: int) -> np.ndarray:
        """Dataset indices of stream positions `start .. start+count-1`, which may cross the end of
        one or more epochs: int64, shape [count]."""
        parts = [np.empty(0, dtype=np.int64)]
        while count > 0:
            epoch, offset = divmod(start, self.num_samples)
            here = min(count, self.num_samples - offset)
            part = np.arange(offset, offset + here, dtype=np.int64)
            if self.shuffle:
                part = permute(part, self.num_samples, derive_key(self.seed, epoch))
            parts.append(part)
            start, count = start + here, count - here
        return np.concatenate(parts)


def derive_key(*parts: int) -> int:
    """Mix integers (seed, epoch, …) of any size and sign into one key of 64 bits."""
    key = 0
    for part in parts:
        key = ((key ^ (part & _MASK_64)) + _GOLDEN) & _MASK_64
        key = ((key ^ (key >> 30)) * _MULTIPLIER_1) & _MASK_64
        key = ((key ^ (key >> 27)) * _MULTIPLIER_2) & _MASK_64
        key ^= key >> 31
    return key


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Images of `positions` (integers in 0..n-1, any shape) under the permutation of `range(n)`
    given by the 64-bit `key`: int64 of the same shape, distinct for distinct positions."""
    positions = np.asarray(positions, dtype=np.int64)
    num_bits = (n - 1).bit_length()
    round_keys = [derive_key(key, index) for index in range(_NUM_ROUNDS)]
    values = _feistel(positions.astype(np.uint64).ravel(), num_bits, round_keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = _feistel(values[outside], num_bits, round_keys)
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64).reshape(positions.shape)


def _feistel(values: np.ndarray, num_bits: int, round_keys: Sequence[int]) -> np.ndarray:
    """A keyed permutation of `range(2 ** num_bits)`; the halves may differ by one bit.

    `values` is a 1-D uint64 array: array arithmetic wraps silently, scalar arithmetic warns.
    """
    left_bits = num_bits // 2
    right_bits = num_bits - left_bits
    left, right = values >> right_bits, values & ((1 << right_bits) - 1)
    for round_key in round_keys:
        left, right = right, (left ^ _mix(right + round_key)) & ((1 << left_bits) - 1)
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> 30)) * _MULTIPLIER_1
    values = (values ^ (values >> 27)) * _MULTIPLIER_2
    return values ^ (values >> 31)
