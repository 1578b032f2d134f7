"""Batch arithmetic: the micro-batches of a step, the rank that owns each, and the samples that they
cover. Exact, never floored; no torch.

[Note: The order of samples] The sample at each place of the endless stream is a pure function of
(seed, epoch, position): a pseudo-random permutation of `range(n)` for each epoch, never stored as a
list. A Feistel network permutes the smallest power of two that holds n (fewer than 2n values).
Values that land outside are sent through again until they land inside ("cycle-walking"), which
keeps the map one-to-one. Both ideas: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
https://eprint.iacr.org/2001/012. The round function is the SplitMix64 finaliser (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014). Only unsigned 64-bit integer
arithmetic is used, so the order is the same on every platform.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradsync.core.files import counted
from gradsync.errors import ConfigError, DataError

_MOST_SHARES_SHOWN = 16
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_NUM_ROUNDS = 8
"""Even, so that the two halves end with their initial widths."""


def require_at_least(least: int, **values: int | None) -> None:
    """Raise ConfigError for the first value given (not None) that is below `least`."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}; got {value}")


def share(num_items: int, rank: int, world_size: int) -> range:
    """The contiguous part of `range(num_items)` that belongs to `rank`.

    The ranks' parts follow each other without gaps, and their sizes differ by at most one.
    """
    return range(rank * num_items // world_size, (rank + 1) * num_items // world_size)


class MicroBatchSpan(NamedTuple):
    """One micro-batch: stream positions `start .. start+count-1`."""

    index: int
    start: int
    count: int


class StepSpan(NamedTuple):
    """One step as one rank sees it."""

    num_micro_batches: int
    """Micro-batches of the step, over all ranks."""
    micro_batches: list[MicroBatchSpan]
    """The micro-batches of this rank, in order."""
    everyone_has_some: bool
    """True when every rank has a micro-batch; equal on all ranks."""


def cut_step(
    start: int, stop: int, *, micro_batch_size: int, rank: int, world_size: int
) -> StepSpan:
    """Cut positions `start .. stop-1` into micro-batches of `micro_batch_size` (the last may be
    shorter).

    The micro-batches depend only on the positions; the world size only decides which rank owns
    which micro-batch. A rank has none if there are fewer micro-batches than ranks.
    """
    num_micro_batches = -(-(stop - start) // micro_batch_size)
    firsts = (
        (index, start + index * micro_batch_size)
        for index in share(num_micro_batches, rank, world_size)
    )
    micro_batches = [
        MicroBatchSpan(index, first, min(micro_batch_size, stop - first)) for index, first in firsts
    ]
    return StepSpan(num_micro_batches, micro_batches, num_micro_batches >= world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """One optimizer step as micro-batches: `num_micro_batches x micro_batch_size =
    global_batch_size`.

    Raises ConfigError when a number is below 1 or a rank would have no micro-batch.
    """

    num_micro_batches: int
    """Micro-batches in a step, over all ranks."""
    micro_batch_size: int
    """Samples in a micro-batch."""
    world_size: int
    """Ranks that share the micro-batches."""
    seq_len: int | None = None
    """Tokens in a sample; None for data without tokens."""

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_micro_batches=self.num_micro_batches,
            micro_batch_size=self.micro_batch_size,
            world_size=self.world_size,
            seq_len=self.seq_len,
        )
        if self.world_size > self.num_micro_batches:
            shared = counted(self.num_micro_batches, "micro-batch", "micro-batches")
            raise ConfigError(
                f"{self.world_size} ranks cannot share {shared} ({self.global_batch_size} samples "
                f"per update / micro_batch_size {self.micro_batch_size}): take fewer ranks, a "
                "smaller micro_batch_size or a larger batch"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples in a step, over all ranks."""
        return self.num_micro_batches * self.micro_batch_size

    @property
    def tokens_per_update(self) -> int:
        """Tokens in a step, over all ranks. Only for plans that know `seq_len`."""
        if self.seq_len is None:
            raise ConfigError("this plan counts samples, not tokens: it has no seq_len")
        return self.global_batch_size * self.seq_len

    def micro_batches_of(self, rank: int) -> range:
        """Indices of the micro-batches that `rank` owns: contiguous; sizes differ by at most
        one."""
        return share(self.num_micro_batches, rank, self.world_size)

    def describe(self, sharer: str = "rank") -> str:
        """Two lines for the start of a run: the arithmetic of a step, and each `sharer`'s share."""
        factors = f"{counted(self.num_micro_batches, 'micro-batch', 'micro-batches')} x "
        factors += counted(self.micro_batch_size, "sample")
        if self.seq_len is None:
            total = f"{self.global_batch_size:,} samples per update = {factors}"
        else:
            tokens = f"{self.tokens_per_update:,} tokens per update"
            total = f"{tokens} = {factors} x {self.seq_len:,} tokens"
        shares = [len(self.micro_batches_of(rank)) for rank in range(self.world_size)]
        if len(shares) <= _MOST_SHARES_SHOWN:
            listed = ", ".join(map(str, shares))
        else:
            counts = sorted(Counter(shares).items(), reverse=True)
            listed = ", ".join(f"{size} on {counted(ranks, sharer)}" for size, ranks in counts)
        return f"{total}\nmicro-batches per {sharer}: {listed}"


def solve_batch_plan(
    *,
    micro_batch_size: int,
    world_size: int,
    tokens_per_update: int | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
) -> BatchPlan:
    """The plan for a step of `global_batch_size` samples over all ranks, or of `tokens_per_update`
    tokens in samples of `seq_len`.

    ConfigError if the numbers do not divide exactly (it names the nearest legal values), or if
    there are more ranks than micro-batches.
    """
    if (tokens_per_update is None) == (global_batch_size is None):
        raise ConfigError("give either tokens_per_update or global_batch_size")
    if tokens_per_update is not None and seq_len is None:
        raise ConfigError("tokens_per_update needs seq_len")
    require_at_least(
        1,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        seq_len=seq_len,
        tokens_per_update=tokens_per_update,
        global_batch_size=global_batch_size,
    )
    if tokens_per_update is not None and seq_len is not None:
        name, total, unit = "tokens_per_update", tokens_per_update, micro_batch_size * seq_len
        product = f"micro_batch_size x seq_len = {micro_batch_size} x {seq_len} = {unit}"
    else:
        name, total, unit = "global_batch_size", global_batch_size or 0, micro_batch_size
        product = f"micro_batch_size = {unit}"
    if total % unit:
        least = unit * world_size
        below = max(total // unit * unit, least)
        raise ConfigError(
            f"{name}={total} is not a multiple of {product}; the nearest legal {name} is "
            f"{below}{f' or {below + unit}' if total > least else ''}"
        )
    return BatchPlan(
        num_micro_batches=total // unit,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        seq_len=seq_len,
    )


# -- the order of samples --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The stream of dataset indices: epoch after epoch, each with its own permutation, see [Note:
    The order of samples].

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
        mixed = right + round_key
        mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER_1
        mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIER_2
        mixed ^= mixed >> 31
        left, right = right, (left ^ mixed) & ((1 << left_bits) - 1)
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right
