"""Counter-based seeds: every random stream is keyed by its purpose, never by a rank.

[Note: Keyed streams] Dropout of micro-batch i in step s is seeded by (seed, s, i): the loader seeds
torch's, numpy's and Python's global generators right before it hands the micro-batch out. No stream
is carried from micro-batch to micro-batch, so nothing per rank has to be saved and a resume is
exact. The rank that computes a micro-batch cannot change its masks, nor do all ranks draw the same
masks, as after one common seed. A micro-batch's forward must come before another micro-batch's
batch is read. If micro-batches are taken first (`list(step)`), each is seeded when its batch is
read, in a second pass with another key. Draws before a step's micro-batches (mixup's lambda), after
its last micro-batch and after the loop use keys of the step, alike on all ranks. Reading a
micro-batch, as random augmentation does, has its own key, in this process and in worker processes
alike. A program with its own random streams turns this off:
`gs.loader(..., seed_micro_batches=False)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal


def stream_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for one stream: the first bytes of SHA-256(seed, purpose, counters)."""
    key = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators alike on every rank.

    For one-time draws, such as initial weights. Draws that differ between ranks or repeat every
    step need a separate stream; see [Note: Keyed streams].
    """
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed the global generators (torch's: CPU and current CUDA device) for one micro-batch."""
    seed_draws(seed, "leaf", step, micro_batch)


def keep_generators() -> Callable[[], None]:
    """Puts the global generators back to what they are now, when called."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return put_back


@contextmanager
def kept_generators() -> Generator[None]:
    """Enclose draws that later ones must not notice, as those of an evaluation."""
    put_back = keep_generators()
    try:
        yield
    finally:
        put_back()


def seed_draws(
    seed: int, purpose: Literal["leaf", "read", "before", "behind", "after"], *counters: int
) -> None:
    """Seed the global generators for draws that follow.

    | purpose | counters | draws |
    | --- | --- | --- |
    | leaf | step, micro-batch | in a micro-batch's forward |
    | read | step, micro-batch | while that micro-batch is read |
    | before, behind | step | before or after a step's micro-batches, alike on all ranks |
    | after | steps | after a loop of `steps`, such as another model's weights, alike |
    """
    import random

    import numpy as np
    import torch
    from torch.utils.data import get_worker_info

    key = stream_seed(seed, purpose, *counters)
    random.seed(key)
    np.random.seed(key % 2**32)
    # Like `torch.manual_seed`, which formats the whole stack if CUDA is not in use: over 1 ms.
    torch.default_generator.manual_seed(key)
    if get_worker_info() is None and torch.cuda.is_available():  # a worker has no CUDA
        torch.cuda.manual_seed(key)
