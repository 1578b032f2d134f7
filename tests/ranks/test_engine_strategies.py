"""Every strategy of the engine on ranks as threads: its promise, on every case."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import pretend_hosts
from support.sync_cases import Case, assert_keeps_its_promise, cases_for, train_case
from support.thread_ranks import run_thread_ranks

ENGINE = [name for name, strategy in STRATEGIES.items() if strategy.recipe is not None]
TINY: dict[str, Any] = {"bucket_mb": 3e-4, "first_bucket_mb": 1e-4}
"""MiB: several buckets in a net of a few hundred bytes."""


def _train_all(name: str, world_size: int, **options: Any) -> list[tuple[Case, list[Any]]]:
    def work(_: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
        comm = ProcessGroupCommunicator(group)
        groups = pretend_hosts(comm, 2 if world_size % 2 == 0 else 1)
        return [train_case(case, name, comm, groups=groups, **options) for case in cases_for(name)]

    by_rank = run_thread_ranks(work, world_size)
    return list(zip(cases_for(name), map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("name", "world_size", "collective"),
    [
        *((name, 3, "backend") for name in ENGINE),
        ("hierarchical", 4, "backend"),
        *((name, 3, "shared_memory") for name in ("bucketed", "invariant", "zero1", "zero2")),
    ],
)
def test_keeps_its_promise(name: str, world_size: int, collective: str) -> None:
    for case, results in _train_all(name, world_size, collective=collective, **TINY):
        assert_keeps_its_promise(case, name, results)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (3, {"reduction": "recursive_doubling"}),
        (4, {"reduction": "hierarchical", "grouping": "flat"}),
        (3, {"reduction": "ring", "overlap": False}),
        (4, {"order": "invariant", "reduction": "hierarchical", "overlap": False}),
    ],
    ids=str,
)
def test_options_make_other_strategies(world_size: int, options: dict[str, Any]) -> None:
    for case, results in _train_all("bucketed", world_size, **options):
        assert_keeps_its_promise(case, "bucketed", results)


@pytest.mark.parametrize("name", ENGINE)
def test_on_one_rank(name: str) -> None:
    """No group, no thread, nothing rounded away that need not be."""
    for case in cases_for(name):
        comm = SingleCommunicator()
        result = train_case(case, name, comm, groups=pretend_hosts(comm, 1))
        assert_keeps_its_promise(case, "naive", [result])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_on_the_wire(name: str) -> None:
    """Gradients of any magnitude come through: each sum is right to what 16 bits can hold.

    W terms, each rounded once, and W-1 additions rounded: an error of at most W units of
    sum |g|. fp16 has a fixed number of exponents below the largest, here taken in by the scale.
    """
    world_size = 2
    cases = list(product((torch.float32, torch.bfloat16, torch.float64), (1.0, 1e6, 1e-9, 1e30)))

    def gradient(rank: int, dtype: torch.dtype, size: float) -> Tensor:
        values = torch.randn(200, generator=torch.Generator().manual_seed(rank)).clamp(-1, 1)
        values[0] = 1.0  # on all ranks: the sum of the largest ones must not overflow
        return (values * size).to(dtype)

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        found = []
        for dtype, size in cases:
            model = nn.ParameterList([nn.Parameter(torch.zeros(200, dtype=dtype))])
            sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
            (model[0] * gradient(rank, dtype, size)).sum().backward()
            sync.close()
            found.append(model[0].grad * world_size)  # backward leaves the mean
        return found

    by_case = zip(*run_thread_ranks(work, world_size), strict=True)
    for (dtype, size), sums in zip(cases, by_case, strict=True):
        gradients = [gradient(rank, dtype, size).double() for rank in range(world_size)]
        unit = max({"bf16": 2.0**-9, "fp16": 2.0**-12}[name] * 2, torch.finfo(dtype).eps)
        bound = world_size * unit * sum(each.abs() for each in gradients)
        if name == "fp16":  # below 2**-14 of its range numbers lie 2**-24 apart
            bound = bound + world_size * size * 2.0**-24
        for found in sums:
            assert bool(found.isfinite().all()), (dtype, size)
            assert bool(((found.double() - sum(gradients)).abs() <= bound).all()), (dtype, size)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """On all ranks, so that a gradient scaler or the loop can see it everywhere."""

    def work(rank: int, group: dist.ProcessGroup) -> list[bool]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(3))])
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        values = torch.tensor([1.0, bad if rank else 1.0, 1.0])
        (model[0] * values).sum().backward()
        sync.close()
        return model[0].grad.isfinite().tolist()

    for finite in run_thread_ranks(work, 3):
        assert not finite[1]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_zero_gradients(name: str) -> None:
    def work(_: int, group: dist.ProcessGroup) -> Tensor:
        model = nn.ParameterList([nn.Parameter(torch.ones(3))])
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        (model[0] * 0.0).sum().backward()
        sync.close()
        return model[0].grad

    for found in run_thread_ranks(work, 2):
        assert torch.equal(found, torch.zeros(3))
