"""A pseudo-random permutation of `range(n)` that needs no memory: no shuffled list is ever stored.

A Feistel network permutes the smallest power of two that holds n (fewer than 2n values). Values
that land outside are sent through again until they land inside ("cycle-walking"), which keeps the
map one-to-one. Both ideas: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
https://eprint.iacr.org/2001/012. The round function is the SplitMix64 finaliser (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014).

Only unsigned 64-bit integer arithmetic is used, so the order is the same on every platform.
"""

from __future__ import annotations

import numpy as np

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_NUM_ROUNDS = 8
"""Even, so that the two halves end with the widths they began with."""


def derive_key(*parts: int) -> int:
    """Mix integers (seed, epoch, …) of any size and sign into one key of 64 bits."""
    key = 0
    for part in parts:
        key = _mix_int(key ^ (part & _MASK_64))
    return key


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where `positions` go under the permutation of `range(n)` that `key` names.

    Args:
        positions: integers in 0..n-1, any shape.
        n: size of the set, at least 1.
        key: 64 bits, see `derive_key`; another key gives another permutation.

    Returns:
        int64 array of the same shape, values in 0..n-1, distinct for distinct positions.

    Raises:
        ValueError: when `n < 1` or a position lies outside 0..n-1.
    """
    if n < 1:
        raise ValueError(f"cannot permute {n} items")
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= n):
        raise ValueError(f"positions must lie in 0..{n - 1}")
    network = _Feistel(num_bits=(n - 1).bit_length(), key=key)
    values = network.encrypt(positions.astype(np.uint64).ravel())
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = network.encrypt(values[outside])
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64).reshape(positions.shape)


class _Feistel:
    """A keyed permutation of `range(2 ** num_bits)`; the halves may differ by one bit."""

    def __init__(self, *, num_bits: int, key: int) -> None:
        self._left_bits = num_bits // 2
        self._right_bits = num_bits - self._left_bits
        self._round_keys = [derive_key(key, index) for index in range(_NUM_ROUNDS)]

    def encrypt(self, values: np.ndarray) -> np.ndarray:
        """`values` is a 1-D uint64 array; array arithmetic wraps silently, scalars would warn."""
        left_bits, right_bits = self._left_bits, self._right_bits
        left, right = values >> right_bits, values & _ones(right_bits)
        for round_key in self._round_keys:
            left, right = right, (left ^ _mix(right + round_key)) & _ones(left_bits)
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right


def _ones(num_bits: int) -> int:
    return (1 << num_bits) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> 30)) * _MULTIPLIER_1
    values = (values ^ (values >> 27)) * _MULTIPLIER_2
    return values ^ (values >> 31)


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK_64
    return value ^ (value >> 31)
