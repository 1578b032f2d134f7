"""The handle's life, and what the engine says of models that it cannot serve."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import pretend_hosts
from support.sync_cases import SmallNet, on_handles, options_for
from support.thread_ranks import run_thread_ranks

ENGINE = ("bucketed", "invariant")
OWN_LOOP = (*ENGINE, "naive")
X = torch.ones(2, 6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_step(sync: GradientSync, **named: Any) -> None:
    sync.backward(sync.forward(X, **named).square().sum(), weight=2, reduction="sum")
    sync.step(sgd(sync.model))


def branched() -> SmallNet:
    return SmallNet(branch=True)


def background_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "gradsync-background"]


# -- parameters that some rank does not use --------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ENGINE)
def test_unused_parameters_are_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="gradsync")

    def work(sync: GradientSync, _: Any) -> None:
        for _ in range(3):
            one_step(sync, use_branch=sync.comm.rank == 1)

    on_handles(work, branched, 3, strategy=name)
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        f"parameter 'branch.weight' and 1 more got no gradient on rank {rank} in this step, but "
        "did on another one; here that counts as zeros (said once)"
        for rank in (0, 2)
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ENGINE)
def test_nothing_is_said_of_what_nobody_uses(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also nothing of a rank that has no leaf: there it is not the model's doing."""
    caplog.set_level(logging.WARNING, logger="gradsync")

    def work(sync: GradientSync, optimizer: Any) -> bool:
        used = []
        weight = sync.model.branch.weight
        optimizer.register_step_pre_hook(lambda *_: used.append(weight.grad is not None))
        if sync.comm.rank != 2:
            sync.backward(
                sync.forward(X, use_branch=False).square().sum(), weight=2, reduction="sum"
            )
        sync.step(optimizer)
        return used[0]

    assert on_handles(work, branched, 3, strategy=name) == [False] * 3
    assert not caplog.records


@pytest.mark.parametrize("name", ENGINE)
def test_a_stale_sum_does_not_come_back(name: str) -> None:
    """Used by all ranks in step 1, by rank 1 only in step 2, by none in step 3."""

    def work(sync: GradientSync, optimizer: Any) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        bias = sync.model.branch.bias
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(None if bias.grad is None else bias.grad.clone())
        )
        for users in ((0, 1), (1,), ()):
            out = sync.forward(X, use_branch=sync.comm.rank in users)
            sync.backward(out.sum(), weight=1, reduction="sum")
            sync.step(optimizer)
        return seen

    for first, second, third in on_handles(work, branched, strategy=name):
        assert torch.equal(first, torch.full((6,), 2.0))
        assert torch.equal(second, torch.full((6,), 1.0))
        assert third is None


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINE)
def test_a_sparse_gradient_is_named(name: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    sync = replicate(model, strategy=name)
    loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(ConfigError, match=r"'0.weight' has a sparse gradient; .* sparse=False"):
        sync.backward(loss, weight=1, reduction="sum")


class _TwiceReentrant(nn.Module):
    """One layer in two segments of reentrant checkpointing."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = x_BC.clone().requires_grad_()
        for _ in range(2):
            x_BC = checkpoint(self.layer, x_BC, use_reentrant=self.use_reentrant)
        return self.head(x_BC)


@pytest.mark.parametrize("name", ENGINE)
def test_reentrant_checkpointing_is_named_and_the_other_works(name: str) -> None:
    sync = replicate(_TwiceReentrant(use_reentrant=True), strategy=name)
    with pytest.raises(
        ConfigError, match=r"'layer\.\w+' got a gradient twice .*use_reentrant=False"
    ):
        one_step(sync)
    model = _TwiceReentrant(use_reentrant=False)
    plain = copy.deepcopy(model)
    one_step(replicate(model, strategy=name))
    (plain(X).square().sum() / 2).backward()
    sgd(plain).step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("inner", "refused"), [((0,), False), ((1,), True), ((0, 1), False)])
@pytest.mark.parametrize("name", OWN_LOOP)
def test_reentrant_checkpointing_in_an_own_loop(
    name: str, inner: tuple[int, ...], refused: bool
) -> None:
    """Its inner backward ends before the outer one: sums must not be taken half-way.

    It is refused by name where it comes first and is not all, as the guide says.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain = copy.deepcopy(model)

    def loss(net: Any) -> Tensor:
        hidden = X.clone().requires_grad_()
        for index, layer in enumerate(net):
            is_inner = index in inner
            hidden = checkpoint(layer, hidden, use_reentrant=True) if is_inner else layer(hidden)
        return hidden.square().sum()

    replicate(model, strategy=name)
    model(X)  # the root's forward, which own loops go through
    loss(plain).backward()
    if refused:
        with pytest.raises(ConfigError, match=r"end cannot be told .* use_reentrant=False"):
            loss(model).backward()
        return
    loss(model).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


# -- its life -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["invariant", "ring"])
def test_close_removes_hooks_and_ends_threads(name: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> None:
        model: Any = sync.model
        one_step(sync)
        assert background_threads()
        sync.close()
        sync.close()
        done.wait()
        assert not background_threads()
        # From here on it is torch alone: no messages, or rank 0 would wait for ever.
        if sync.comm.rank == 0:
            loss = model(X).square().sum()
            expected = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
            loss.backward()
            optimizer.step()
            assert torch.equal(model.weight.grad, expected)

    done = threading.Barrier(2)
    on_handles(work, lambda: nn.Linear(6, 6), strategy=name, collective="backend")


@pytest.mark.parametrize("name", OWN_LOOP)
def test_a_copy_is_a_plain_model(name: str) -> None:
    """For an average of weights, or an evaluation: no hooks, no handle, no messages."""
    model = nn.Linear(6, 6)
    sync = replicate(model, strategy=name)
    one_step(sync)
    twin = copy.deepcopy(model)
    twin(X).sum().backward()
    assert torch.equal(twin.bias.grad, torch.full((6,), 2.0))
    twin.zero_grad()
    one_step(replicate(twin, strategy=name))
    one_step(sync)


@pytest.mark.parametrize("name", OWN_LOOP)
@pytest.mark.parametrize(
    ("save", "load"),
    [(pickle.dump, pickle.load), (torch.save, partial(torch.load, weights_only=False))],
)
def test_a_replicated_model_can_be_saved_whole(name: str, save: Any, load: Any) -> None:
    """It comes back as the plain model that it was."""
    model = nn.Linear(6, 6)
    one_step(replicate(model, strategy=name))
    file = io.BytesIO()
    save(model, file)
    file.seek(0)
    back = load(file)
    assert torch.equal(back.weight, model.weight)
    back(X).sum().backward()
    assert torch.equal(back.bias.grad, torch.full((6,), 2.0))
    back.zero_grad()
    one_step(replicate(back, strategy=name))


@pytest.mark.parametrize("name", OWN_LOOP)
def test_a_forgotten_handle_keeps_working(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = nn.Linear(6, 1, bias=False)
        replicate(model, strategy=name, comm=ProcessGroupCommunicator(group))
        gc.collect()
        model(torch.full((1, 6), float(rank))).sum().backward()
        return model.weight.grad.clone()

    for gradient in run_thread_ranks(work, 3):
        torch.testing.assert_close(gradient, torch.full((1, 6), 1.0))


@pytest.mark.parametrize("name", [*OWN_LOOP, "ring"])
def test_a_model_that_is_done_with_goes_away(name: str) -> None:
    """Not closed, only dropped: no hook, thread or table holds on to the weights."""

    def work(rank: int, group: dist.ProcessGroup) -> list[weakref.ref[Any]]:
        model = nn.Linear(6, 6)
        sync = replicate(model, strategy=name, comm=ProcessGroupCommunicator(group))
        one_step(sync)
        if name != "ring":
            model(X).sum().backward()
        return [weakref.ref(model), weakref.ref(sync), weakref.ref(model.weight)]

    found = run_thread_ranks(work, 2)
    gc.collect()
    assert [ref() for refs in found for ref in refs] == [None] * 6


@pytest.mark.parametrize("name", OWN_LOOP)
def test_frozen_parts_are_left_alone(name: str) -> None:
    model = SmallNet(branch=False)
    sync = replicate(model, strategy=name)
    before = model.frozen.weight.clone()
    one_step(sync)
    assert model.frozen.weight.grad is None
    assert torch.equal(model.frozen.weight, before)
    assert len(sync.reducer.parameters) == 3, "the tied weight once, two biases"


@pytest.mark.parametrize("name", [name for name, s in STRATEGIES.items() if not s.needs_group])
def test_an_error_on_one_rank_reaches_the_others(name: str) -> None:
    """Rank 1 fails between two leaves, with buckets under way; no rank hangs."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Linear(6, 6)
        comm = ProcessGroupCommunicator(group)
        options = options_for(name) | {"hosts": pretend_hosts(comm, 1)}
        sync = replicate(model, strategy=name, comm=comm, **options)
        try:
            for step in range(3):
                for last in (False, True):
                    if (rank, step, last) == (1, 1, True):
                        raise ValueError("injected")
                    with sync.micro_step(last=last):
                        sync.backward(sync.forward(X).sum(), weight=1, reduction="sum")
                sync.step(sgd(model))
        except RuntimeError:
            survivors.append(rank)
        finally:
            sync.close()

    survivors: list[int] = []
    with pytest.raises(ValueError, match="injected"):
        run_thread_ranks(work, 3, timeout_s=10)
    assert sorted(survivors) == [0, 2]
