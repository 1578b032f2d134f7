"""Torch's strategies on real process groups: equal to one rank, on every case."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync.comm.groups import communicator, share_placement
from gradsync.errors import ConfigError, GradsyncError
from gradsync.sync.reducer import sum_gradients
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.rank_session import open_session
from support.sync_cases import CASES, assert_keeps_its_promise, cases_for, train_case

ON_PROCESSES_ONLY = [name for name, strategy in STRATEGIES.items() if strategy.needs_group]
"""Thread ranks run the others."""


def _train(rank: int, world_size: int, store_path: str, name: str) -> list[dict[str, Any]]:
    with open_session(rank, world_size, store_path) as world:
        comm = communicator(world)
        hosts = share_placement(comm, world)
        return [train_case(case, name, comm, hosts=hosts) for case in cases_for(name)]


# DDP with find_unused_parameters marks a branch that some rank did not use as ready with zeros,
# and leaves zeros, not None, where no rank used it: AdamW's weight decay then applies.
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ON_PROCESSES_ONLY)
def test_keeps_its_promise(pool: Any, name: str, world_size: int) -> None:
    by_rank = pool.run(_train, world_size, name)
    for case, *results in zip(cases_for(name), *by_rank, strict=True):
        assert_keeps_its_promise(case, name, results)


def _fail_on_one_rank(
    rank: int, world_size: int, store_path: str, name: str
) -> tuple[str, list[str]]:
    """Rank 1 raises between two leaves of step 3; what each rank got, and threads left."""
    got = "nothing"
    options = {"start_powerSGD_iter": 2} if name == "powersgd" else {}
    try:
        with open_session(rank, world_size, store_path) as world:
            model = nn.Linear(4, 4)
            sync = replicate(model, world, strategy=name, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                for last in (False, True):
                    with sync.micro_step(last=last):
                        loss = sync.forward(torch.ones(2, 4)).square().sum()
                        if (rank, step, last) == (1, 3, True):
                            raise ValueError("injected")
                        sync.backward(loss, weight=2, reduction="sum")
                sync.step(optimizer)
    except (ValueError, RuntimeError) as error:
        got = type(error).__name__
    gc.collect()
    return got, [t.name for t in threading.enumerate() if t.name.startswith("gradsync")]


@pytest.mark.parametrize("name", ON_PROCESSES_ONLY)
def test_an_error_on_one_rank_is_no_hang(pool: Any, name: str) -> None:
    survivor, failed = pool.run(_fail_on_one_rank, 2, name, timeout_s=20.0)
    assert failed[0] == "ValueError"
    assert survivor[0] not in ("nothing", "ValueError")


def _misuse_ddp(rank: int, world_size: int, store_path: str) -> list[str]:
    said = []
    with open_session(rank, world_size, store_path) as world:
        model = nn.Linear(2, 2)
        sync = replicate(model, world, strategy="ddp")
        with torch.no_grad():
            assert sync.forward(torch.ones(1, 2)).isfinite().all()  # evaluation may
        with pytest.raises(ConfigError) as outside:
            sync.backward(sync.forward(torch.ones(1, 2)).sum(), weight=1, reduction="sum")
        with pytest.raises(ConfigError) as past, sync.micro_step(last=True):
            sync.backward(model(torch.ones(1, 2)).sum(), weight=1, reduction="sum")
        said += [str(outside.value), str(past.value)]
    return said


def test_misuse_of_ddp_is_named(pool: Any) -> None:
    for outside, past in pool.run(_misuse_ddp, 2):
        assert "sync.micro_step(last=micro_batch.is_last, index=micro_batch.index)" in outside
        assert "the forward did not go through `sync.forward(...)`" in past


def _unlike(rank: int, world_size: int, store_path: str, name: str) -> list[str]:
    """Errors for another learning rate, for a plain backward, for weights changed on rank 0."""
    said = []
    with open_session(rank, world_size, store_path) as world:
        model = nn.Linear(2, 2)
        sync = replicate(model, world, strategy=name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = sync.replica.whole_parameters
        for mistake in ("rate", "plain", "weights")[: 3 if whole else 1]:
            optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1) if mistake == "rate" else 0.1
            if (rank, mistake) == (0, "weights"):
                model.load_state_dict(nn.Linear(2, 2).state_dict())
            with sync.micro_step(last=True):
                loss = sync.forward(torch.ones(1, 2)).sum()
                loss.backward() if mistake == "plain" else sync.backward(
                    loss, weight=1, reduction="sum"
                )
            try:
                sync.step(optimizer)
            except GradsyncError as error:
                said.append(str(error))
            model.zero_grad()
        sync.close()
    return said


@pytest.mark.parametrize("name", ON_PROCESSES_ONLY)
def test_ranks_that_differ_are_refused(pool: Any, name: str) -> None:
    expected = (
        "lr of group 0 differs: rank 0 0.1, rank 1 0.2; no rank has updated its weights",
        "loss.backward() is followed by optimizer.step()",
        "replicas differ, first in 'weight' (2 of 2 tensors): since the last step (or gs.repl",
    )
    for said in pool.run(_unlike, 2, name):
        assert len(said) == (1 if name == "fsdp" else 3)
        assert all(text.startswith(begin) for text, begin in zip(said, expected, strict=False))


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


def under_detail(rank: int, world_size: int, store_path: str) -> dict[str, str]:
    """What a step of each strategy comes to where torch wraps process groups."""
    came, level = {}, dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with open_session(rank, world_size, store_path, timeout_s=20.0) as world:
            for name in STRATEGIES:
                model = nn.Linear(4, 4)
                try:
                    sync = replicate(model, world, strategy=name, **UNSHARED.get(name, {}))
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    with sync.micro_step(last=True):
                        loss = sync.forward(torch.ones(2, 4)).square().sum()
                        sync.backward(loss, weight=2, reduction="sum")
                    sync.step(optimizer)
                    sync.close()
                    came[name] = "works"
                except ConfigError as error:
                    came[name] = str(error)
    finally:
        dist.set_debug_level(level)
    return came


UNSHARED = {"invariant": {"collective": "backend"}}


def test_torchs_detailed_debugging_works_or_is_refused_by_name(pool: Any) -> None:
    for came in pool.run(under_detail, 2):
        refused = {name for name, said in came.items() if said != "works"}
        assert [s for s in came.values() if s != "works" and "DEBUG=DETAIL" not in s] == []
        assert refused >= {"ring", "ddp", "powersgd", "invariant"}
        assert not refused & {"naive", "flat", "overlap", "bucketed"}
