"""Every strategy of the registry on real process groups: equal to one rank, on every case."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gradsync.comm.choose import communicator
from gradsync.comm.single import SingleCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.reducer import sum_gradients
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.rank_session import open_session
from support.sync_cases import CASES, Case, assert_equal_to_one_rank, train_case


def _train(rank: int, world_size: int, store_path: str, case: Case, name: str) -> dict[str, Any]:
    with open_session(rank, world_size, store_path) as world:
        options = (
            {"find_unused_parameters": case.branch_leaves is not None} if name == "ddp" else {}
        )
        return train_case(case, name, communicator(world), **options)


# DDP with find_unused_parameters marks a branch that some rank did not use as ready with zeros,
# and leaves zeros, not None, where nobody used it: AdamW's weight decay then applies.
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_one_rank(pool: Any, name: str, case: Case, world_size: int) -> None:
    oracle = train_case(case, "naive", SingleCommunicator())
    assert_equal_to_one_rank(pool.run(_train, world_size, case, name), oracle)


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_needs_no_group(name: str) -> None:
    case = CASES[0]
    result = train_case(case, name, SingleCommunicator())
    assert_equal_to_one_rank([result], train_case(case, "naive", SingleCommunicator()))


def _forward_past_ddp(rank: int, world_size: int, store_path: str) -> str:
    with open_session(rank, world_size, store_path) as world:
        model = nn.Linear(2, 2)
        sync = replicate(model, world, sync="ddp")
        try:
            with sync.micro_step(last=True):
                sync.backward(model(torch.ones(1, 2)).sum(), weight=1)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_forward_past_ddp_is_named(pool: Any) -> None:
    for message in pool.run(_forward_past_ddp, 2):
        assert "the forward did not go through `sync.forward(...)`" in message


def _without_micro_step(rank: int, world_size: int, store_path: str) -> tuple[str, bool]:
    with open_session(rank, world_size, store_path) as world:
        sync = replicate(nn.Linear(2, 2), world, sync="ddp")
        with torch.no_grad():
            finite = bool(sync.forward(torch.ones(1, 2)).isfinite().all())  # evaluation may
        try:
            sync.backward(sync.forward(torch.ones(1, 2)).sum(), weight=1)
        except ConfigError as error:
            return str(error), finite
    return "", finite


def test_a_leaf_outside_of_micro_step_is_refused(pool: Any) -> None:
    for message, evaluated in pool.run(_without_micro_step, 2):
        assert "`with sync.micro_step(last=leaf.is_last):`" in message
        assert evaluated


def _flag_after_forward(rank: int, world_size: int, store_path: str) -> float:
    """The known trap: synchronisation switched off for the backward only."""
    with open_session(rank, world_size, store_path) as world:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        sync = replicate(model, world, sync="ddp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for last in (False, True):
                inputs = torch.full((2, 4), float(rank + step))
                with sync.micro_step(last=last):
                    sync.backward(sync.forward(inputs).square().sum(), weight=2)
            sync.step(optimizer)
        other = model.weight.detach().clone()
        communicator(world).broadcast(other).wait()
        return float((other - model.weight.detach()).abs().max())


def test_accumulation_keeps_replicas_equal(pool: Any) -> None:
    assert pool.run(_flag_after_forward, 2) == [0.0, 0.0]


def _exposed(rank: int, world_size: int, store_path: str, name: str) -> list[int]:
    """Identity of the reading of each step: a shared one would count the last step N times."""
    with open_session(rank, world_size, store_path) as world:
        model = nn.Linear(4, 4)
        sync = replicate(model, world, sync=name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        readings = []
        for _ in range(3):
            with sync.micro_step(last=True):
                sync.backward(sync.forward(torch.ones(1, 4)).sum(), weight=1)
            readings.append(sync.step(optimizer).exposed)
        assert all(reading.seconds() > 0 for reading in readings)
        return [id(reading) for reading in readings]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_step_has_its_own_reading(pool: Any, name: str) -> None:
    for identities in pool.run(_exposed, 2, name):
        assert len(set(identities)) == 3


def _count_sums_after_backward(rank: int, world_size: int, store_path: str) -> int:
    """How often DDP's adapter had to sum by itself, over three ordinary steps."""
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return sum_gradients(*arguments)

    with (
        mock.patch("gradsync.sync.torch_ddp.sum_gradients", counted),
        open_session(rank, world_size, store_path) as world,
    ):
        train_case(CASES[0], "ddp", communicator(world))
    return len(calls)


def test_ddp_reduces_during_backward(pool: Any) -> None:
    """The sums would be right after backward, too; then DDP would not be DDP."""
    assert pool.run(_count_sums_after_backward, 2) == [0, 0]
