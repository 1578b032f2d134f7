"""What a strategy remembered is taken up by the same strategy only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.checkpoint.store import Snapshot
from gradsync.train.state import take_strategy_state

MOMENTUM = {"outer_momentum/a": torch.zeros(2), "outer_momentum/b": torch.zeros(1)}


def snapshot_of(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Snapshot:
    return Snapshot(step=3, tensors={"sync": tensors}, state=state)


def test_the_same_strategy_takes_it_up() -> None:
    found = snapshot_of({"config": {"sync": "diloco"}}, MOMENTUM)
    assert take_strategy_state(found, "diloco") == (MOMENTUM, [])


def test_another_one_leaves_it_behind_and_says_so() -> None:
    found = snapshot_of({"config": {"sync": "diloco"}}, MOMENTUM)
    tensors, notes = take_strategy_state(found, "invariant")
    assert tensors == {}
    assert notes == ["diloco's outer momentum is left behind: the run goes on with invariant"]


@pytest.mark.parametrize("sync", ["diloco", "invariant"])
def test_nothing_remembered_is_nothing_to_say(sync: str) -> None:
    found = snapshot_of({"config": {"sync": "diloco"}}, {})
    assert take_strategy_state(found, sync) == ({}, [])


@pytest.mark.parametrize("state", [{}, {"config": {}}])
def test_a_checkpoint_that_does_not_say_is_taken_for_the_same(state: dict[str, Any]) -> None:
    assert take_strategy_state(snapshot_of(state, MOMENTUM), "diloco") == (MOMENTUM, [])
    assert take_strategy_state(Snapshot(step=3, tensors={}, state=state), "diloco") == ({}, [])
