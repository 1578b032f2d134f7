"""Ranks that step otherwise, or hold other weights: refused by name, before an update hides it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, DriftError, GradsyncError, RunError
from gradsync.sync.gradient_sync import HANDLE, GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import pretend_hosts
from support.sync_cases import on_handles
from support.thread_ranks import run_thread_ranks

Case = tuple[str, dict[str, Any]]
"""A strategy and its options."""
Change = Callable[[int, nn.Module, torch.optim.Optimizer], None]
"""(rank, model, its optimizer): what a program does between two steps."""

BACKEND = {"collective": "backend"}
STEPPING: list[Case] = [
    *((name, {}) for name, strategy in STRATEGIES.items() if not strategy.needs_group),
    ("invariant", BACKEND),
    ("bucketed", BACKEND),
]
"""The others need processes."""
OWN_LOOP: list[Case] = [("invariant", {}), ("naive", {}), ("bucketed", BACKEND)]


def nothing(*_: Any) -> None:
    pass


def load(rank: int, model: nn.Module, _: Any) -> None:
    if rank == 0:
        model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})


def past_the_counters(rank: int, model: nn.Module, _: Any) -> None:
    if rank == 1:
        model[1].weight.data.mul_(0.5)


def other_memory(rank: int, model: nn.Module, _: Any) -> None:
    if rank == 1:
        model[1].weight.data = model[1].weight.data * 0.5


def frozen(rank: int, model: nn.Module, _: Any) -> None:
    if rank == 0:
        with torch.no_grad():
            model[2].weight.add_(0.5)


EDITS = (load, past_the_counters, other_memory, frozen)
"""Changes on one rank."""


def clip(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(max=0.05)
    model[1].weight.data = torch.full_like(model[1].weight, 0.25)
    sync = getattr(model, HANDLE)
    if sync.reducer.strategy in ("zero1", "zero2"):
        sync.replica.gather(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def there_and_back(rank: int, model: nn.Module, _: Any) -> None:
    if rank == 0:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: p * 0 for name, p in kept.items()})
        model.load_state_dict(kept)


ALIKE = (clip, there_and_back)
"""Changes that leave ranks equal."""


def plateau(rank: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler that looks at a loss which each rank has for itself."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 1.0 - rank):
        scheduler.step(loss)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    model[2].requires_grad_(False)
    return model


def step(sync: GradientSync, optimizer: torch.optim.Optimizer, own: bool, **named: Any) -> None:
    loss = sync.model(torch.ones(2, 3) * (1 + sync.comm.rank)).square().sum()
    if own:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        sync.backward(loss, weight=2, reduction="sum")
        sync.step(optimizer, **named)


def run(
    case: Case, *changes: Change, own: bool = False, steps: int = 2, world_size: int = 2
) -> list[list[tuple[str, Tensor]]]:
    """For each change: the ranks' errors after `steps` steps, the change after the first, and all
    their weights."""
    name, options = case

    def train(rank: int, comm: ProcessGroupCommunicator, between: Change) -> tuple[str, Tensor]:
        model = net()
        hosts = pretend_hosts(comm, world_size)
        sync = replicate(model, strategy=name, comm=comm, hosts=hosts, **options)
        optimizer = adamw(model)
        said = ""
        try:
            for number in range(steps):
                step(sync, optimizer, own)
                if number == 0:
                    between(rank, model, optimizer)
        except GradsyncError as error:
            said = f"{type(error).__name__}: {error}"
        weights = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        sync.close()
        return said, weights

    def work(rank: int, group: dist.ProcessGroup) -> list[tuple[str, Tensor]]:
        comm = ProcessGroupCommunicator(group)
        return [train(rank, comm, between) for between in changes]

    return [list(ranks) for ranks in zip(*run_thread_ranks(work, world_size), strict=True)]


# -- hyper-parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STEPPING, ids=str)
def test_ranks_that_differ_are_refused_before_the_update(case: Case) -> None:
    changes = (nothing, plateau, *EDITS, *ALIKE)
    before, rates, *others = run(case, *changes, steps=2)
    assert [said for said, _ in before] == ["", ""]
    for said, weights in rates:
        assert said.startswith(
            "ConfigError: lr of group 0 differs: rank 0 0.05, rank 1 0.1; no rank has updated"
        )
        assert not torch.equal(weights, before[0][1])
    if case[0] not in ("local_sgd", "diloco"):  # whose ranks differ on purpose
        assert_edits_are_refused(others)


@pytest.mark.parametrize("case", OWN_LOOP, ids=str)
def test_a_loop_of_ones_own_is_refused_at_the_next_synchronisation(case: Case) -> None:
    rates, *others = run(case, plateau, *EDITS, *ALIKE, own=True, steps=3)
    for said, _ in rates:
        assert said.startswith("ConfigError: lr of group 0 differs: rank 0 0.05, rank 1 0.1; so")
        assert "and their weights do: go back to a checkpoint" in said
    assert_edits_are_refused(others)


def assert_edits_are_refused(found: list[list[tuple[str, Tensor]]]) -> None:
    """After EDITS and ALIKE."""
    for editor, ((rank_0, first), (rank_1, second)) in zip((0, 1, 1, 0), found, strict=False):
        assert rank_0 == rank_1
        assert rank_0.startswith("DriftError: replicas differ, first in ")
        assert f"weights were changed on rank {editor}, not by the optimizer" in rank_0
        assert not torch.equal(first, second)
    for (first, weights), (second, others) in found[len(EDITS) :]:
        assert (first, second) == ("", "")
        assert torch.equal(weights, others)


def test_a_forward_that_changes_weights_is_named() -> None:
    """Each rank shortens the rows of its own tokens."""

    def work(rank: int, group: dist.ProcessGroup) -> str:
        torch.manual_seed(0)
        model = nn.Embedding(4, 3, max_norm=0.1)
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        sync.backward(model(torch.tensor([rank])).sum(), weight=1, reduction="sum")
        with pytest.raises(DriftError) as caught:
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        sync.close()
        return str(caught.value)

    for said in run_thread_ranks(work, 2):
        assert "'weight'" in said
        assert "ranks 0,1" in said
        assert "forward" in said
        assert "max_norm" in said


def test_what_else_can_differ() -> None:
    def betas(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if rank == 1:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)

    def fewer(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if rank == 2:
            optimizer.param_groups[0]["params"].pop()

    def state(rank: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
        if rank == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    texts = (
        "betas of group 0 differs: ranks 0,2 (0.9, 0.999), rank 1 (0.5, 0.9); no rank",
        "the list of parameters of group 0 differs: ranks 0,1 4 (",
        "the state of optimizer 0 differs: ranks 0,1 kept from the last step, rank 2 loaded since",
    )
    found = run(("invariant", {}), betas, fewer, state, world_size=3)
    for ranks, text in zip(found, texts, strict=True):
        assert all(said.startswith(f"ConfigError: {text}") for said, _ in ranks), ranks


def test_one_clip_norm_for_all_ranks() -> None:
    """Each would scale its share of the gradient by another factor."""

    def work(sync: GradientSync, optimizer: Any) -> Tensor:
        for mine in (0.5, None):
            refused = rf"clip_norm differs: rank 0 {mine}, rank 1 1\.0; no rank has updated"
            with pytest.raises(ConfigError, match=refused):
                step(sync, optimizer, False, clip_norm=1.0 if sync.comm.rank else mine)
        step(sync, optimizer, False, clip_norm=1.0 if sync.comm.rank else 1)
        return sync.model[0].weight.detach()

    first, second = on_handles(work, net)
    assert torch.equal(first, second)


def test_who_only_looks_at_a_state_has_loaded_none() -> None:
    def work(sync: GradientSync, _: Any) -> None:
        optimizer = adamw(sync.model)
        if sync.comm.rank == 0:
            assert not any(optimizer.state[parameter] for parameter in sync.model.parameters())
        step(sync, optimizer, False)

    on_handles(work, net)


def test_a_step_goes_on_once_ranks_are_alike() -> None:
    def work(sync: GradientSync, optimizer: Any) -> Tensor:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1 * (sync.comm.rank + 1))
        with pytest.raises(ConfigError, match=r"lr of group 0 differs: rank 0 0\.1\d+, rank 1 0"):
            step(sync, optimizer, False)
        optimizer.param_groups[0]["lr"].fill_(0.5)
        step(sync, optimizer, False)
        return sync.model[0].weight.detach()

    first, second = on_handles(work, net)
    assert torch.equal(first, second)
    assert not torch.equal(first, net()[0].weight)


def test_a_step_that_is_thrown_away_compares_nothing() -> None:
    """A rank that wants to stop, or has no leaf, does not change the message's length either."""

    def work(sync: GradientSync, _: Any) -> list[bool]:
        model, rank = sync.model, sync.comm.rank
        optimizer = adamw(model)
        if rank:
            sync.backward(model(torch.ones(1, 3)).sum(), weight=1, reduction="sum")
            optimizer.param_groups[0]["lr"] = 7.0
            found = [sync.step(optimizer, stop=True).discarded]
        else:
            sync.discard()
            found = [True]
        optimizer.param_groups[0]["lr"] = 0.1
        if rank:
            sync.backward(model(torch.ones(1, 3)).sum(), weight=1, reduction="sum")
        result = sync.step(optimizer, stop=rank == 1)
        return [*found, result.discarded, result.stop]

    assert on_handles(work, net) == [[True, False, True]] * 2


def test_the_two_ways_to_step_do_not_meet() -> None:
    """One rank has no leaf and takes part by `optimizer.step()`: it would divide by another number
    than the others."""

    def work(sync: GradientSync, optimizer: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            optimizer.step() if sync.comm.rank else step(sync, optimizer, own=False)
        return str(caught.value)

    for said in on_handles(work, net):
        assert "the call differs: rank 0 sync.step(), rank 1 loss.backward() or optimizer" in said


# -- weights ---------------------------------------------------------------------------------------


def test_a_handle_overwrites_weights_on_all_ranks() -> None:
    def work(sync: GradientSync, _: Any) -> Tensor:
        optimizer = adamw(sync.model)
        step(sync, optimizer, False)
        sync.replica.load_full_weights({name: p * 2 for name, p in net().state_dict().items()})
        step(sync, optimizer, False)
        return sync.model[0].weight.detach()

    first, second = on_handles(work, net)
    assert torch.equal(first, second)


def test_samples_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change past the counters in one of more parameters than are looked into at once."""
    monkeypatch.setattr("gradsync.sync.watch._SAMPLED", 2)

    def work(sync: GradientSync, _: Any) -> None:
        optimizer = adamw(sync.model)
        for _ in range(2):  # after the first it looks into 2.*, then into 0.*
            step(sync, optimizer, False)
            if sync.comm.rank:
                sync.model[0].bias.data.mul_(0.5)
        with pytest.raises(RunError, match=r"'0.bias' .* changed on rank 1, not"):
            step(sync, optimizer, False)

    on_handles(work, net)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("sync", "options"), OWN_LOOP)
def test_an_edit_within_an_update_is_noticed_in_the_next_step(
    sync: str, options: dict[str, Any], own: bool
) -> None:
    """By a hook on one rank, which leaves no sign between steps; `BACKEND` with the step whole."""

    def work(handle: GradientSync, _: Any) -> None:
        optimizer = adamw(handle.model)

        def edit(*_: Any) -> None:
            if handle.comm.rank == 1:
                handle.model[1].weight.data.mul_(0.5)

        hook = optimizer.register_step_post_hook(edit)
        step(handle, optimizer, own)
        hook.remove()
        with pytest.raises(RunError, match=r"'1.weight'"):
            step(handle, optimizer, own)

    on_handles(work, net, strategy=sync, **options)
