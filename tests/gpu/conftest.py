"""Set-up of tests on CUDA, without the leak check: NCCL's socket, the compiler's threads and its
variables stay until the process ends."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_leaks() -> None:
    """In place of the suite's own."""
