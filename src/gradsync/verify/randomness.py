"""Random generators that are put back: a check must not change what is drawn after it."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_randomness() -> Generator[None]:
    """Torch's, numpy's and Python's global generators are afterwards as they were before."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
