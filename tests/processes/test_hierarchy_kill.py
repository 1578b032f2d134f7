"""Kill -9 of a rank on one of two hosts: its own host and the other one say so within seconds."""

from __future__ import annotations

import pytest

from support.kill_trials import kill_trials

MOVES = (1, 38, 97)
"""The first segment being made, the first buckets, the middle of training; on both hosts."""


@pytest.mark.timeout(120)
def test_moments_of_all_kinds() -> None:
    assert len(kill_trials("killed_hosts", 4, MOVES)) == len(MOVES)
