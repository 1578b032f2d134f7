"""Stochastic rounding to bf16 number by number, the readable twin of `sync/stochastic_rounding`."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor


def plain_bits(keys: tuple[int, int], element: int) -> int:
    """16 random bits of an element."""
    first, second = (key % 2**32 for key in keys)
    x = element // 2 ^ first
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32 ^ second
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    x ^= x >> 16
    return x >> 16 if element % 2 else x % 2**16


def plainly_rounded(
    value: Tensor, seed: int, step: int, node: tuple[int, int], parameter: int
) -> Tensor:
    """Each number up or down, by the bits of this node and element."""
    named = b"".join(number.to_bytes(8, "little") for number in (seed, step, *node, parameter))
    keys = struct.unpack("<2i", hashlib.blake2b(named, digest_size=8).digest())
    found = []
    for element, number in enumerate(value.flatten().tolist()):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = (bits + plain_bits(keys, element)) >> 16 << 16
        found.append(struct.unpack("<f", struct.pack("<I", bits))[0] + 0.0)
    return torch.tensor(found).bfloat16().view(value.shape)
