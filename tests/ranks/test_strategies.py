"""Every strategy on ranks as threads: its promise, on every case."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES, find_strategy
from gradsync.sync.replicate import replicate
from support.engine_cases import pretend_hosts
from support.sync_cases import (
    CASES,
    Case,
    SmallNet,
    assert_keeps_its_promise,
    cases_for,
    on_handles,
    one_rank,
    train_case,
    train_plainly,
)
from support.thread_ranks import run_thread_ranks

ENGINE = [name for name, strategy in STRATEGIES.items() if strategy.recipe is not None]
TINY: dict[str, Any] = {"bucket_mb": 3e-4, "first_bucket_mb": 1e-4}
"""MiB: several buckets in a net of a few hundred bytes."""


def _train_all(name: str, world_size: int, **options: Any) -> list[tuple[Case, list[Any]]]:
    def work(_: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
        comm = ProcessGroupCommunicator(group)
        hosts = pretend_hosts(comm, 2 if world_size % 2 == 0 else 1)
        return [train_case(case, name, comm, hosts=hosts, **options) for case in cases_for(name)]

    by_rank = run_thread_ranks(work, world_size)
    return list(zip(cases_for(name), map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("name", "world_size", "collective"),
    [
        *((name, 3, "backend") for name in ENGINE),
        ("naive", 4, None),
        ("hierarchical", 4, "backend"),
        *((name, 3, "shared_memory") for name in ("bucketed", "invariant", "zero1", "zero2")),
    ],
)
def test_keeps_its_promise(name: str, world_size: int, collective: str | None) -> None:
    options = {"collective": collective, **TINY} if collective else {}
    for case, results in _train_all(name, world_size, **options):
        assert_keeps_its_promise(case, name, results)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {"reduction": "hierarchical", "grouping": "flat"}),
        (3, {"reduction": "ring", "overlap": False}),
        (4, {"order": "invariant", "reduction": "hierarchical", "overlap": False}),
    ],
    ids=str,
)
def test_options_make_other_strategies(world_size: int, options: dict[str, Any]) -> None:
    for case, results in _train_all("bucketed", world_size, **options):
        assert_keeps_its_promise(case, "bucketed", results)


@pytest.mark.parametrize("name", STRATEGIES)
def test_on_one_rank(name: str) -> None:
    """No group, no thread, nothing rounded away that need not be; `diloco` steps twice even so, and
    nodes are rounded wherever they are formed."""
    for case in cases_for(name):
        comm = SingleCommunicator()
        result = train_case(case, name, comm, hosts=pretend_hosts(comm, 1))
        own = name if name in ("diloco", "invariant_bf16") else "naive"
        assert_keeps_its_promise(case, own, [result])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_on_the_wire(name: str) -> None:
    """Gradients of any magnitude come through: each sum is right to what 16 bits can hold, in each
    part of a complex one.

    W terms, each rounded once, and W-1 additions rounded: an error of at most W units of
    sum |g|. fp16 has a fixed number of exponents below the largest, here taken in by the scale.
    """
    world_size = 2
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
    cases = list(product(dtypes, (1.0, 1e6, 1e-9, 1e30)))

    def gradient(rank: int, dtype: torch.dtype, size: float) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        if dtype.is_complex:  # the larger part is what fp16 has to be scaled by; it holds the other
            parts = 0.5 + torch.rand(100, 2, generator=generator, dtype=torch.float64)
            parts[:, 1] *= -1000.0
            return torch.view_as_complex(parts * size).to(dtype)
        values = torch.randn(200, generator=generator).clamp(-1, 1)
        values[0] = 1.0  # on all ranks: the sum of the largest ones must not overflow
        return (values * size).to(dtype)

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        found = []
        for dtype, size in cases:
            given = gradient(rank, dtype, size)
            model = nn.ParameterList([nn.Parameter(torch.zeros_like(given))])
            sync = replicate(model, strategy=name, comm=ProcessGroupCommunicator(group))
            # The gradient of Re(p conj(g)) is g.
            (model[0] * given.conj()).real.sum().backward()
            sync.close()
            assert model[0].grad.dtype == dtype
            found.append(wide(model[0].grad * world_size))  # backward leaves the mean
        return found

    def wide(tensor: Tensor) -> Tensor:
        return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()

    by_case = zip(*run_thread_ranks(work, world_size), strict=True)
    for (dtype, size), sums in zip(cases, by_case, strict=True):
        gradients = [wide(gradient(rank, dtype, size)) for rank in range(world_size)]
        unit = max({"bf16": 2.0**-9, "fp16": 2.0**-12}[name] * 2, torch.finfo(dtype).eps)
        bound = world_size * unit * sum(each.abs() for each in gradients)
        if name == "fp16" and not dtype.is_complex:  # below 2**-14 numbers lie 2**-24 apart
            bound = bound + world_size * size * 2.0**-24
        assert torch.equal(*sums), (dtype, size)
        for found in sums:
            assert bool(found.isfinite().all()), (dtype, size)
            assert bool(((found - sum(gradients)).abs() <= bound).all()), (dtype, size)
            assert not (dtype.is_complex and torch.equal(found, sum(gradients))), "not in 16 bits"


def three_ones() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """On all ranks, so that a gradient scaler or the loop can see it everywhere."""

    def work(sync: GradientSync, _: Any) -> list[bool]:
        values = torch.tensor([1.0, bad if sync.comm.rank else 1.0, 1.0])
        (sync.model[0] * values).sum().backward()
        return sync.model[0].grad.isfinite().tolist()

    for finite in on_handles(work, three_ones, 3, strategy=name):
        assert not finite[1]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_zero_gradients(name: str) -> None:
    def work(sync: GradientSync, _: Any) -> Tensor:
        (sync.model[0] * 0.0).sum().backward()
        return sync.model[0].grad

    for found in on_handles(work, three_ones, strategy=name):
        assert torch.equal(found, torch.zeros(3))


@pytest.mark.parametrize("case", cases_for("naive"), ids=lambda case: case.name)
def test_the_oracle_is_plain_torch(case: Case) -> None:
    """One rank of the twin against a loop without gradsync: everything else leans on it."""
    expected = train_plainly(case)
    found = one_rank(case)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)


def test_an_unused_parameter_stays_as_it_was() -> None:
    """Weight decay must not touch what no rank used: its gradient stays None, not zero."""
    case = next(case for case in CASES if case.branch_leaves == ())
    results = run_thread_ranks(
        lambda _, group: train_case(case, "naive", ProcessGroupCommunicator(group)), 2
    )
    torch.manual_seed(1000)
    start = SmallNet(branch=True).state_dict()["branch.weight"]
    assert torch.equal(results[1]["weights"]["branch.weight"], start)


def test_a_step_without_any_target_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    sync = replicate(model, strategy="naive")
    sync.backward(0.0 * model(torch.ones(1, 2)).sum(), weight=0, reduction="sum")
    sync.step(torch.optim.AdamW(model.parameters(), lr=1.0))
    assert torch.equal(model.weight, before)
    assert sync.mean_loss != sync.mean_loss  # nan: there is no mean over nothing


def test_bad_requests() -> None:
    with pytest.raises(
        ConfigError, match="unknown sync strategy 'naiv'; perhaps you meant 'naive'"
    ):
        find_strategy("naiv")
    with pytest.raises(
        ConfigError, match=r"strategy='naive' has no option 'bucket_mb' \(it has: none"
    ):
        replicate(nn.Linear(2, 2), strategy="naive", bucket_mb=1.0)
    with pytest.raises(ConfigError, match=r"no option 'bucket_size' .it has: bucket_mb"):
        replicate(nn.Linear(2, 2), strategy="ddp", bucket_size=1.0)
    with pytest.raises(RunError, match="no trainable parameter"):
        replicate(nn.Linear(2, 2).requires_grad_(False), strategy="naive")


def test_every_strategy_says_what_it_costs() -> None:
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert "bytes" in strategy.cost
        assert "operation" in strategy.cost
        assert strategy.summary
