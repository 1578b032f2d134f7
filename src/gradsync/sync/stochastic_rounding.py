"""Rounding to bf16, up or down by chance, with random bits that belong to a node and an element.

    fp32     s eeeeeeee mmmmmmm tttttttttttttttt     a node's value, the sum of two bf16 numbers
             + random bits      rrrrrrrrrrrrrrrr     16 of them, carried into m with odds t / 2^16
    bf16     s eeeeeeee mmmmmmm                      the rest is cut off

So the mean over random bits is the value itself (Connolly, Higham & Mary 2021, "Stochastic rounding
and its probabilistic backward error analysis"), where rounding to nearest loses small terms of a
sum again and again. A value that bf16 has stays as it is.

[Note: Counted bits] Random bits come from a counter, not from a generator that moves on: hashed
from (seed, step, node of the tree, parameter, element in it). Whichever rank forms a node, in
whatever bucket or shard of one, alone or as one of many, finds the same bits, and so does a run
that is resumed, as the step is saved. A hash of 32 bits, from an element's index and two keys of
the rest, serves two elements: two rounds of multiplying and folding, with the constants of
MurmurHash3's last step (Appleby, public domain), which leave no bit of the index alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.sync.layout import Slot

Node = tuple[int, int]
"""(level, index) in the tree, see [Note: The tree] in buckets.py."""

STEP = "rounding/step"
"""Name of the number of steps among a strategy's saved tensors."""
_LOW = 0xFFFF
_FIRST_FACTOR, _SECOND_FACTOR = 0x85EBCA6B, 0xC2B2AE35
_BLOCK = 65_536
"""Elements that are rounded together on a CPU: what is made of them stays in its cache."""


class StochasticRounding:
    """Rounds the nodes of one model's tree.

    Args:
        seed: names the random bits, together with what the module's note lists.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.step = 0
        """Steps before this one; the same on all ranks."""

    def leaf(self, gradient: Tensor, parameter: int, leaf: int) -> Tensor:
        """The leaf's whole gradient of a parameter, in bf16 and its shape; without -0.0."""
        rounded = torch.empty(gradient.shape, dtype=torch.bfloat16, device=gradient.device)
        flat = gradient.reshape(-1)
        self._write(rounded.view(-1), flat, None, self._keys((0, leaf), parameter), 0)
        return rounded

    def add(self, left: Tensor, right: Tensor, slots: Sequence[Slot], start: int, at: Node) -> None:
        """Add `right` to `left`, both bf16, [n]: what two nodes below node `at` have of a bucket's
        elements from `start` on. Padding between `slots` is zero and stays so."""
        stop = start + left.numel()
        for slot in slots:
            first, last = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if first < last:
                part, keys = slice(first - start, last - start), self._keys(at, slot.index)
                self._write(left[part], left[part], right[part], keys, first - slot.offset)

    def _keys(self, node: Node, parameter: int) -> tuple[int, int]:
        """Two signed numbers of 32 bits; a hash, lest nodes next to each other share bits."""
        named = struct.pack("<5q", self._seed, self.step, *node, parameter)
        first, second = struct.unpack("<2i", hashlib.blake2b(named, digest_size=8).digest())
        return first, second

    def _write(
        self, out: Tensor, left: Tensor, right: Tensor | None, keys: tuple[int, int], first: int
    ) -> None:
        """Put into `out`, [n], the rounded sum; element 0 is element `first` of its parameter."""
        size = _BLOCK if out.device.type == "cpu" else max(out.numel(), 1)
        for start in range(0, out.numel(), size):
            part = slice(start, min(start + size, out.numel()))
            total = left[part].float()
            if right is not None:
                total.add_(right[part].float())
            bits = random_bits(keys, first + start, total.numel(), total.device)
            bits.add_(total.view(torch.int32)).bitwise_and_(~_LOW)
            # Adds 0.0, which makes -0.0 of small leaves 0.0; to inf and nan, whose bits may have
            # become a number's, nan.
            out[part].copy_(bits.view(torch.float32).add_(total - total))


def random_bits(keys: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of the elements `first`, `first` + 1 ...: int32, [count], 0 .. 65535.

    Elements 2k and 2k + 1 take the low and the high half of the k-th hash.
    """
    words = range(first // 2, (first + count + 1) // 2)
    x = torch.arange(words.start, words.stop, dtype=torch.int32, device=device)
    x.bitwise_xor_(keys[0])
    _fold(x, 16).mul_(_signed(_FIRST_FACTOR)).bitwise_xor_(keys[1])
    _fold(x, 13).mul_(_signed(_SECOND_FACTOR))
    halves = _fold(x, 16).view(torch.int16)[first % 2 :][:count]  # little-endian, as all of torch
    return halves.to(torch.int32).bitwise_and_(_LOW)


def _fold(x: Tensor, places: int) -> Tensor:
    """x ^= x >> places, without the sign's copies, which a shift of signed numbers brings."""
    return x.bitwise_xor_((x >> places).bitwise_and_((1 << (32 - places)) - 1))


def _signed(word: int) -> int:
    """The number of 32 bits with a sign that has these bits."""
    return word - (1 << 32) if word >> 31 else word
