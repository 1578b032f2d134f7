"""Counter-based seeds: every random stream is keyed by what it is for, never by a rank.

[Note: Keyed streams] Dropout of leaf i in step s is seeded by (seed, s, i): the loader seeds
torch's generators right before it reads the leaf and hands it out. No stream is carried from leaf
to leaf, so nothing per rank has to be saved, a resume is exact, and which rank computes a leaf
cannot change its masks; nor do all ranks draw the same ones, as they would after one common seed.
It holds as long as a leaf's forward comes before the next leaf is asked for. What a data set draws
while a leaf is read, as random augmentation does, has a key of its own, in this process and in
worker processes alike, and by Python's and numpy's global generators too; but for the read those
two are the program's. After the loop torch's are alike on all ranks again.
A program with random streams of its own turns it off: `gs.loader(..., seed_leaves=False)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager


def stream_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for one stream: the first bytes of SHA-256(seed, purpose, counters)."""
    key = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators alike on every rank.

    For what happens once, such as initial weights. Anything that differs between ranks or comes
    again each step wants a stream of its own; see [Note: Keyed streams].
    """
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_leaf(seed: int, step: int, leaf: int) -> None:
    """Seed torch's default generators (CPU and current CUDA device) for one leaf of one step."""
    _seed_torch(stream_seed(seed, "leaf", step, leaf))


def seed_after(seed: int, step: int) -> None:
    """Seed them alike on all ranks for what comes after a loop of `step` steps, such as another
    model: the last leaf, and its key, is another one on each rank."""
    _seed_torch(stream_seed(seed, "after", step))


def _seed_torch(key: int) -> None:
    import torch
    from torch.utils.data import get_worker_info

    # As `torch.manual_seed`, which formats the whole stack where CUDA is not in use: over 1 ms.
    torch.default_generator.manual_seed(key)
    if get_worker_info() is None and torch.cuda.is_available():  # a worker has no CUDA
        torch.cuda.manual_seed(key)


@contextmanager
def seeded_read(seed: int, step: int, leaf: int) -> Generator[None]:
    """Enclose the read of one leaf, seeded by a key of its own: torch's default generators, and
    those of Python and numpy, which go on afterwards as if nothing had been read."""
    import random

    import numpy as np

    key = stream_seed(seed, "read", step, leaf)
    python, numpy = random.getstate(), np.random.get_state()
    _seed_torch(key)
    random.seed(key)
    np.random.seed(key % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
