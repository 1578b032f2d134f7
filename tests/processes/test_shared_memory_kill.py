"""Kill -9 of any rank at any moment: the others say so within seconds, and nothing is left."""

from __future__ import annotations

import pytest

from support.kill_trials import kill_trials

MOVES = (1, 2, 6, 9, 14, 23, 31, 38, 45, 52, 60, 85, 86, 90, 97, 110, 121, 150, 203, 301)
"""From the first segment being made to the middle of training; ranks 0, 1 and 2 in turn."""


@pytest.mark.timeout(120)
def test_twenty_moments() -> None:
    trials = kill_trials("killed_ranks", 3, MOVES)
    assert len(trials) == 20
    assert {trial["victim"] for trial in trials} == {0, 1, 2}
    for trial in trials:
        for message in trial["said"].values():
            by_flags = f"rank {trial['victim']} " in message and "has ended" in message
            by_gloo = "onnection" in message  # while ranks still met by messages
            assert by_flags or by_gloo, trial
    # Most of them are killed while memory is all that connects them.
    named = [t for t in trials if any("has ended" in m for m in t["said"].values())]
    assert len(named) >= 8
