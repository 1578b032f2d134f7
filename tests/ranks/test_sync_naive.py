"""The readable twin, on ranks as threads: equal to one rank in every case."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync.registry import STRATEGIES, find_strategy
from gradsync.sync.replicate import replicate
from support.sync_cases import (
    CASES,
    Case,
    SmallNet,
    assert_equal_to_one_rank,
    cases_for,
    one_rank,
    train_case,
    train_plainly,
)
from support.thread_ranks import run_thread_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", cases_for("naive"), ids=lambda case: case.name)
def test_equals_one_rank(case: Case, world_size: int) -> None:
    results = run_thread_ranks(
        lambda _, group: train_case(case, "naive", ProcessGroupCommunicator(group)), world_size
    )
    assert_equal_to_one_rank(results, one_rank(case))


@pytest.mark.parametrize("case", cases_for("naive"), ids=lambda case: case.name)
def test_the_oracle_is_plain_torch(case: Case) -> None:
    """One rank of the twin against a loop without gradsync: everything else leans on it."""
    expected = train_plainly(case)
    found = one_rank(case)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)


def test_an_unused_parameter_stays_as_it_was() -> None:
    """Weight decay must not touch what nobody used: its gradient stays None, not zero."""
    case = next(case for case in CASES if case.branch_leaves == ())
    results = run_thread_ranks(
        lambda _, group: train_case(case, "naive", ProcessGroupCommunicator(group)), 2
    )
    torch.manual_seed(1000)
    start = SmallNet(branch=True).state_dict()["branch.weight"]
    assert torch.equal(results[1]["weights"]["branch.weight"], start)


def test_any_rank_may_ask_to_stop() -> None:
    def work(rank: int, group: object) -> list[bool]:
        model = nn.Linear(2, 1)
        sync = replicate(model, sync="naive", comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stops = []
        for step in range(3):
            sync.backward(model(torch.ones(1, 2)).sum(), weight=1)
            stops.append(sync.step(optimizer, stop=(rank, step) == (1, 1)).stop)
        return stops

    assert run_thread_ranks(work, 3) == [[False, True, False]] * 3


def test_a_step_without_any_target_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    sync = replicate(model, sync="naive")
    sync.backward(0.0 * model(torch.ones(1, 2)).sum(), weight=0)
    sync.step(torch.optim.AdamW(model.parameters(), lr=1.0))
    assert torch.equal(model.weight, before)
    assert sync.mean_loss != sync.mean_loss  # nan: there is no mean over nothing


def test_bad_requests() -> None:
    with pytest.raises(
        ConfigError, match="unknown sync strategy 'naiv'; perhaps you meant 'naive'"
    ):
        find_strategy("naiv")
    with pytest.raises(ConfigError, match=r"sync='naive' has no option 'bucket_mb' \(it has: none"):
        replicate(nn.Linear(2, 2), sync="naive", bucket_mb=1.0)
    with pytest.raises(ConfigError, match=r"no option 'bucket_size' .it has: bucket_mb"):
        replicate(nn.Linear(2, 2), sync="ddp", bucket_size=1.0)
    with pytest.raises(RunError, match="no trainable parameter"):
        replicate(nn.Linear(2, 2).requires_grad_(False), sync="naive")


def test_every_strategy_says_what_it_costs() -> None:
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert "bytes" in strategy.cost
        assert "operation" in strategy.cost
        assert strategy.summary
