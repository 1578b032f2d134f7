"""Communication hooks on plain DDP, against DDP without one."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.errors import ConfigError
from gradsync.sync import comm_hook as module
from gradsync.sync.comm_hook import STRATEGIES, BucketWorker, comm_hook
from gradsync.world import World
from support.rank_session import open_session


def _gradients(world: World, strategy: str | None, options: dict[str, Any]) -> list[list[Tensor]]:
    """Gradients of each of three steps, under DDP with several buckets.

    Strategy None: without a hook; "local": this rank's own.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if strategy not in (None, "local"):
        comm_hook(strategy, **options).register(ddp)
    torch.manual_seed(world.rank)
    found = []
    for _ in range(3):
        for synchronise in (False, strategy != "local"):  # no hook while it accumulates
            with contextlib.nullcontext() if synchronise else ddp.no_sync():
                ddp(torch.randn(4 + world.rank, 64)).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        ddp.zero_grad()
    return found


COMPRESSING = {"start_powerSGD_iter": 2}
KINDS: list[tuple[str | None, dict[str, Any]]] = [
    *((strategy, {}) for strategy in (None, "local", *STRATEGIES)),
    ("powersgd", COMPRESSING),
]


def _all_gradients(rank: int, world_size: int, store_path: str) -> list[list[list[Tensor]]]:
    with open_session(rank, world_size, store_path) as world:
        return [_gradients(world, *kind) for kind in KINDS]


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_ddp_without_hook(pool: Any, world_size: int) -> None:
    """PowerSGD until it begins to compress. Bound: one rounding on each rank for the division, one
    for the way to the wire, and one for each addition. Lossy ones do lose something."""
    by_rank = pool.run(_all_gradients, world_size)
    plain, local, *by_hook = zip(*by_rank, strict=True)
    for (strategy, options), hooked in zip(KINDS[2:], by_hook, strict=True):
        if options is COMPRESSING:
            pairs = zip(plain[0][2], hooked[0][2], strict=True)
            assert any(not torch.equal(a, b) for a, b in pairs), strategy
            continue
        for step in range(3):
            for index, expected in enumerate(plain[0][step]):
                size = torch.stack([mine[step][index].abs() for mine in local]).mean(dim=0)
                for rank in range(world_size):
                    got = hooked[rank][step][index]
                    assert torch.equal(got, hooked[0][step][index]), strategy
                    bound = (world_size + 2) * 2**-24 * size
                    assert bool(((got - expected).abs() <= bound).all()), strategy


def _by_hand(rank: int, world_size: int, store_path: str) -> tuple[float, set[str]]:
    """DDP's own registration; the placement asked for by the hook; where the summing ran."""
    threads = set()
    original = module._averaging

    def noted(*arguments: Any) -> Any:
        average = original(*arguments)

        def noting(tensor: Tensor) -> None:
            threads.add(threading.current_thread().name)
            average(tensor)

        return noting

    with open_session(rank, world_size, store_path), mock.patch.object(module, "_averaging", noted):
        model = nn.Linear(2, 1, bias=False)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(*comm_hook("hierarchical"))
        ddp(torch.full((1, 2), float(rank))).sum().backward()
        return float(model.weight.grad[0, 0]), threads


def test_registered_by_hand_it_runs_beside_backward(pool: Any) -> None:
    assert pool.run(_by_hand, 3) == [(1.0, {"gradsync-background"})] * 3


def _subgroup(rank: int, world_size: int, store_path: str) -> float:
    """Ranks 1 and 2 alone: the hook takes DDP's group, not the default one."""
    with open_session(rank, world_size, store_path):
        ranks = [1, 2]
        group = dist.new_group(ranks)
        if rank not in ranks:
            return 0.0
        model = nn.Linear(2, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=group)
        comm_hook("ring").register(nn.Sequential(ddp))  # found inside, as in Fabric's wrapper
        ddp(torch.full((1, 2), float(rank))).sum().backward()
        return float(model.weight.grad[0, 0])


def test_the_group_is_ddps_own(pool: Any) -> None:
    assert pool.run(_subgroup, 3) == [0.0, 1.5, 1.5]


def _hierarchical_on_two_of_three(rank: int, world_size: int, store_path: str) -> str:
    """Rank 2 takes no part, so nothing may wait for it."""
    with open_session(rank, world_size, store_path, timeout_s=20.0):
        group = dist.new_group([0, 1])
        if rank == 2:
            return ""
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
        comm_hook("hierarchical").register(ddp)
        with pytest.raises(ConfigError) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        return str(caught.value)


def test_hierarchical_says_that_the_group_is_not_everybody(pool: Any) -> None:
    first, second, _ = pool.run(_hierarchical_on_two_of_three, 3)
    for message in (first, second):
        assert "the model's group has 2 of 3 ranks, and it takes all" in message


def _tuple_with_group(rank: int, world_size: int, store_path: str) -> float:
    with open_session(rank, world_size, store_path):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        model, group = nn.Linear(1, 1, bias=False), groups[rank // 2]
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(*comm_hook("ring", group=group))
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        return float(model.weight.grad)


def test_registered_by_hand_it_averages_over_the_group_it_is_given(pool: Any) -> None:
    assert pool.run(_tuple_with_group, 4) == [0.5, 0.5, 2.5, 2.5]


def _one_rank_fails(rank: int, world_size: int, store_path: str) -> str:
    """Rank 1 fails in its first bucket of several and leaves; rank 0 must not wait for ever."""
    planted = mock.patch.object(module, "_averaging", _planted)
    with open_session(rank, world_size, store_path):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        comm_hook("ring").register(ddp)
        message = ""
        try:
            if rank == 1:
                with planted:
                    ddp(torch.ones(2, 64)).sum().backward()
            else:
                ddp(torch.ones(2, 64)).sum().backward()
        except (RuntimeError, ZeroDivisionError) as error:
            message = str(error)
        return message


def _planted(*_: Any) -> Any:
    def fail(tensor: Tensor) -> None:
        raise ZeroDivisionError("planted on the worker")

    return fail


def test_a_failure_comes_out_of_backward(pool: Any) -> None:
    first, second = pool.run(_one_rank_fails, 2)
    assert "planted on the worker" in second
    assert first
    assert "planted" not in first  # rank 0 has an error of its own: the connection


def test_after_a_failure_no_bucket_is_touched() -> None:
    """Peers no longer answer: a later bucket would wait for them."""
    worker = BucketWorker(torch.device("cpu"))
    later: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError("planted")

    first = worker.submit(torch.zeros(1), fail)
    second = worker.submit(torch.zeros(1), lambda: later.append("touched"))
    for future in (first, second):
        with pytest.raises(RuntimeError, match="planted"):
            future.wait()
    assert later == []


def _misuse(rank: int, world_size: int, store_path: str) -> list[str]:
    with open_session(rank, world_size, store_path):
        model = nn.Linear(2, 2)
        two = nn.ModuleList(DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        messages = []
        for wrong in (model, two):
            with pytest.raises(ConfigError) as caught:
                comm_hook("ring").register(wrong)
            messages.append(str(caught.value))
        return messages


def test_it_belongs_to_one_ddp(pool: Any) -> None:
    for none, two in pool.run(_misuse, 2):
        assert "belongs to one DistributedDataParallel; 0 in Linear" in none
        assert "2 in ModuleList" in two


def test_on_one_rank_without_ddp_there_is_nothing_to_do() -> None:
    comm_hook("ring").register(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("rings", {}, "unknown strategy of comm_hook 'rings'; perhaps you meant 'ring'"),
        ("invariant", {}, "there are: ring, hierarchical, powersgd"),
        ("ring", {"rank": 1}, r"comm_hook\('ring'\) has no option 'rank'"),
        ("powersgd", {"rank": 1}, "unexpected keyword argument 'rank'"),
        ("powersgd", {"start_powerSGD_iter": 1}, "`start_powerSGD_iter` > 1"),
    ],
)
def test_bad_requests(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, TypeError, ValueError), match=message):
        comm_hook(strategy, **options)
