"""Programs that go wrong with other trainers: here each is right, or says what is wrong."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.own_loops import assert_gradients, gradients, loss_of, mean_gradients, on_ranks
from support.thread_ranks import run_thread_ranks

every_engine = pytest.mark.parametrize("name", ["invariant", "bucketed"])
every_strategy = pytest.mark.parametrize("name", ["invariant", "bucketed", "naive"])


@dataclass
class Leaf:
    """What a loader tells of a leaf."""

    index: int
    is_last: bool
    num_targets: int = 4


class FailsOnce(torch.autograd.Function):
    """Its first backward raises; `left` counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, left: list[int]) -> Tensor:
        ctx.left = left
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        if ctx.left[0]:
            ctx.left[0] -= 1
            raise FloatingPointError("injected")
        return gradient, None


class Fragile(nn.Module):
    """Two layers; between them a backward may fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.left = [failures]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(FailsOnce.apply(torch.tanh(self.a(x)), self.left))


X = torch.linspace(-1, 1, 12).view(4, 3)


def alone(model: nn.Module, **named: Any) -> GradientSync:
    return replicate(model, comm=SingleCommunicator(), **named)


def two_layers() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


# -- what the model becomes after gs.replicate -----------------------------------------------------


@every_strategy
def test_parts_of_a_container_that_is_gone_stay_synchronised(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        first, second = two_layers()
        comm = ProcessGroupCommunicator(group)
        replicate(nn.ModuleList([first, second]), sync=name, comm=comm)
        gc.collect()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        second(first(X * (rank + 1))).square().sum().backward()
        optimizer.step()
        first._gradsync.close()
        return first.weight.detach()

    first, second = run_thread_ranks(work, 2)
    assert torch.equal(first, second)


@every_strategy
def test_a_parameter_that_outlives_its_model_says_so(name: str) -> None:
    model = two_layers()
    weight = model[0].weight
    alone(model, sync=name)
    del model
    gc.collect()
    with pytest.raises(ConfigError, match=r"and its handle, are gone: keep the model, or call"):
        weight.sum().backward()


@every_engine
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("change", ["replaced", "unfrozen"])
def test_parameters_that_came_too_late_are_named(name: str, own: bool, change: str) -> None:
    model = two_layers()
    model[0].requires_grad_(change == "replaced")
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = alone(model, sync=name)
    if change == "replaced":
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model[0].requires_grad_(True)
        optimizer = old
    loss = model(X).sum()
    said = r"parameter '0.weight' was replaced or became trainable after gs.replicate"
    if own:
        loss.backward()
        with pytest.raises(ConfigError, match=said):
            optimizer.step()
    else:
        sync.backward(loss, weight=4)
        with pytest.raises(ConfigError, match=said):
            sync.step(optimizer)
    sync.close()


def test_parameters_frozen_later_are_left_alone() -> None:
    model = two_layers()
    sync = alone(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    sync.backward(model(X).sum(), weight=4)
    sync.step(optimizer)
    assert torch.equal(model[0].weight, before)
    sync.close()


@pytest.mark.parametrize("part", [True, False])
def test_a_parameter_has_one_handle(part: bool) -> None:
    model = two_layers()
    sync = alone(model if part else model[1])
    name = "'weight'" if part else "'1.weight'"
    with pytest.raises(ConfigError, match=rf"parameter {name} of this model is replicated already"):
        alone(model[1] if part else model)
    sync.close()
    alone(model[1] if part else model).close()


@every_engine
def test_another_dtype_is_named(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    model.double()
    with pytest.raises(ConfigError, match=r"'1\..*was torch.float32 when the model was replicated"):
        sync.backward(model(X.double()).sum(), weight=4)
    sync.close()


# -- two ways of stepping, mixed -------------------------------------------------------------------


@every_strategy
def test_the_two_ways_are_not_mixed(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    with pytest.raises(ConfigError, match=r"loss.backward\(\) is followed by optimizer.step\(\)"):
        sync.step(optimizer)
    optimizer.zero_grad()
    sync.backward(model(X).sum(), weight=4)
    with pytest.raises(ConfigError, match=r"sync.backward\(\) is followed by sync.step\(optimizer"):
        optimizer.step()
    loss = model(X).sum()
    with pytest.raises(ConfigError, match=r"a backward that is not sync.backward\(\) reached"):
        loss.backward()
    sync.close()


@every_strategy
def test_plain_backwards_in_micro_step_are_refused(name: str) -> None:
    """Uneven shares: each backward would be a step of its own, and ranks would pair different
    ones."""

    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = two_layers()
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        with sync.micro_step(last=rank == 2), pytest.raises(ConfigError) as caught:
            model(X).sum().backward()
        sync.close()
        return str(caught.value)

    for said in run_thread_ranks(work, 3):
        assert "write sync.backward(loss_sum, leaf=leaf) there and sync.step(optimizer)" in said


@every_strategy
def test_a_sum_is_not_finished_as_a_mean(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    sync.backward(model(X).sum(), weight=4)
    with pytest.raises(ConfigError, match=r"by sync.step\(optimizer\), not by sync.finish"):
        sync.finish()
    sync.close()


@every_engine
@pytest.mark.parametrize("collective", ["auto", "backend"])
def test_a_skipped_step_is_named(name: str, collective: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = two_layers()
        comm = ProcessGroupCommunicator(group)
        sync = replicate(model, sync=name, comm=comm, collective=collective)
        for leaf in (Leaf(2 * rank, False), Leaf(2 * rank + 1, True)):
            sync.backward(model(X).sum(), leaf=leaf)
        loss = model(X).sum()
        with pytest.raises(ConfigError, match=r"sync.step\(\) was not called in between"):
            sync.backward(loss, leaf=Leaf(2 * rank, False))
        sync.close()

    run_thread_ranks(work, 2)


@every_strategy
def test_an_optimizer_that_evaluates_the_loss_is_refused(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    sync.backward(model(X).sum(), weight=4)
    with pytest.raises(ConfigError, match=r"sync.step\(\) cannot run LBFGS, whose step evaluates"):
        sync.step(torch.optim.LBFGS(model.parameters()))
    sync.close()


def test_a_second_step_for_a_second_optimizer_is_refused() -> None:
    model = two_layers()
    sync = alone(model)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    sync.backward(model(X).sum(), weight=4)
    sync.step(first)
    with pytest.raises(
        ConfigError, match=r"without a backward on any rank .* sync.step\(\[a, b\]\)"
    ):
        sync.step(second)
    sync.close()


@every_strategy
def test_gradients_that_no_optimizer_uses_do_not_add_up(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
    norms = []
    for _ in range(3):
        sync.backward(model(X).sum(), weight=4)
        norms.append(float(sync.step(optimizer, clip_norm=1.0).grad_norm))
    assert norms[0] == norms[1] == norms[2]
    sync.close()


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -3.0])
def test_a_weight_is_a_number_of_something(weight: float) -> None:
    model = two_layers()
    sync = alone(model)
    with pytest.raises(ConfigError, match=f"finite number >= 0, got {weight}"):
        sync.backward(model(X).sum(), weight=weight)
    sync.close()


def test_a_closed_handle_says_so() -> None:
    model = two_layers()
    sync = alone(model)
    sync.close()
    sync.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: sync.backward(model(X).sum(), weight=4),
        lambda: sync.step(optimizer),
        sync.finish,
        sync.no_sync,
        sync.discard,
    ):
        with pytest.raises(ConfigError, match="this handle is closed"):
            call()


# -- a backward that raises ------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("failing_leaf", [0, 1])
def test_a_failed_backward_is_thrown_away(
    name: str, failing: tuple[int, ...], failing_leaf: int
) -> None:
    """One of two leaves fails in the second of four steps; that step is done again."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, list[bool]]:
        comm = ProcessGroupCommunicator(group)
        model = Fragile()
        sync = replicate(model, sync=name, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        discarded = []
        for step in (0, 1, 1, 2, 3):
            try:
                for leaf in range(2):
                    fails = len(discarded) == 1 and rank in failing and leaf == failing_leaf
                    model.left[0] = int(fails)
                    with sync.micro_step(last=leaf == 1, index=2 * rank + leaf):
                        loss = model(X * (step + rank + leaf)).square().sum()
                        sync.backward(loss, weight=4)
            except FloatingPointError:
                with pytest.raises(ConfigError, match=r"call sync.discard\(\) in place of step"):
                    sync.backward(model(X).sum(), weight=1)
                sync.discard()
                discarded.append(True)
            else:
                discarded.append(sync.step(optimizer).discarded)
        sync.close()
        return model.a.weight.detach(), discarded

    def undisturbed(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = Fragile()
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            for leaf in range(2):
                with sync.micro_step(last=leaf == 1, index=2 * rank + leaf):
                    sync.backward(model(X * (step + rank + leaf)).square().sum(), weight=4)
            sync.step(optimizer)
        sync.close()
        return model.a.weight.detach()

    expected = run_thread_ranks(undisturbed, 2)[0]
    for weight, discarded in run_thread_ranks(work, 2):
        assert discarded == [False, True, False, False, False]
        assert torch.equal(weight, expected)


@every_engine
def test_leaves_can_be_thrown_away(name: str) -> None:
    model = two_layers()
    sync = alone(model, sync=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync.backward(model(X).sum() * float("nan"), weight=4)
    sync.discard()
    sync.backward(model(X).sum(), weight=4)
    sync.step(optimizer)
    assert model[0].weight.isfinite().all()
    assert sync.mean_loss == pytest.approx(float(two_layers()(X).sum().detach()) / 4)
    sync.close()


@every_strategy
def test_a_failed_backward_in_a_loop_of_ones_own(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
        model = Fragile(failures=int(rank == 1))
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(X * (rank + 1)).square().sum()
        if rank == 1:
            with pytest.raises(FloatingPointError, match="injected"):
                loss.backward()
            with pytest.raises(ConfigError, match=r"call sync.discard\(\) first"):
                model(X)
            sync.discard()
        else:
            loss.backward()
        lost = model.a.weight.grad
        optimizer.step()
        optimizer.zero_grad()
        model(X * (rank + 1)).square().sum().backward()
        gradient = model.a.weight.grad.clone()
        sync.close()
        return gradient, lost

    grads = []
    for rank in range(2):
        model = Fragile()
        model(X * (rank + 1)).square().sum().backward()
        grads.append(model.a.weight.grad)
    for gradient, lost in run_thread_ranks(work, 2):
        assert lost is None
        torch.testing.assert_close(gradient, (grads[0] + grads[1]) / 2)


@every_strategy
@pytest.mark.parametrize("own", [True, False])
def test_a_rank_whose_forward_failed_discards(name: str, own: bool) -> None:
    """In the first step, before anything tells which of the two ways the program goes."""

    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = two_layers()
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model[0].weight.detach().clone()
        if rank == 1:
            sync.discard()
        elif own:
            model(X).square().sum().backward()
            optimizer.step()
        else:
            sync.backward(model(X).square().sum(), weight=4)
            assert sync.step(optimizer).discarded
        sync.close()
        return model[0].weight.detach() - before

    for moved in run_thread_ranks(work, 2, timeout_s=10.0):
        assert not moved.any()


# -- ranks that do different things, once more -----------------------------------------------------


@every_strategy
@pytest.mark.parametrize("by", ["step", "finish"])
def test_a_rank_without_a_backward_after_a_skipped_step(name: str, by: str) -> None:
    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        optimizer.param_groups[0]["lr"] = 0.0
        loss_of(sync.model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(sync.model, rank, 1).backward()
        optimizer.zero_grad()  # and no step
        if rank != 1:
            loss_of(sync.model, rank, 2).backward()
        elif by == "finish":
            sync.finish()
        optimizer.step()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(2, users=(0, 2)))


@every_strategy
def test_a_rank_without_a_backward_gives_nothing_of_the_last_step(name: str) -> None:
    """It did not clear its gradients, since it had no backward to clear them for."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        optimizer.param_groups[0]["lr"] = 0.0
        loss_of(sync.model, rank, 0).backward()
        optimizer.step()
        if rank != 1:
            optimizer.zero_grad()
            loss_of(sync.model, rank, 2).backward()
        optimizer.step()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(2, users=(0, 2)))


@every_strategy
def test_two_steps_with_the_same_gradients(name: str) -> None:
    """No rank had a backward in between: then the last gradients are used again, as without us."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> list[dict[str, Tensor | None]]:
        loss_of(sync.model, rank).backward()
        optimizer.step()
        first = gradients(sync.model)
        optimizer.step()
        return [first, gradients(sync.model)]

    for first, second in on_ranks(name, loop):
        assert_gradients(first, mean_gradients(0))
        assert all(torch.equal(second[key], first[key]) for key in first if first[key] is not None)


@every_strategy
def test_gradients_put_there_by_hand_are_averaged(name: str) -> None:
    """In every step, also when no hook has seen a backward."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> list[Tensor]:
        found = []
        for step in range(2):
            for parameter in sync.reducer.parameters:
                parameter.grad = torch.full_like(parameter, float(rank + step))
            optimizer.step()
            found.append(sync.reducer.parameters[0].grad.clone())
        return found

    for first, second in on_ranks(name, loop):
        torch.testing.assert_close(first, torch.ones_like(first))
        torch.testing.assert_close(second, torch.full_like(second, 2.0))


@every_strategy
def test_optimizers_on_schedules_of_their_own(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = two_layers()
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        often, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
        for step in range(2):
            if (rank, step) != (1, 1):
                model(X * (rank + step + 1)).square().sum().backward()
            if step == 1:
                seldom.step()
            often.step()
            often.zero_grad()
            seldom.zero_grad()
        sync.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    first, second = run_thread_ranks(work, 2)
    assert torch.equal(first, second)


@every_strategy
def test_models_take_part_in_the_order_of_their_handles(name: str) -> None:
    """One rank has no backward: its one optimizer takes part for four models."""

    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        junk = [object() for _ in range(1000 * rank)]
        comm = ProcessGroupCommunicator(group)
        models = [nn.Linear(4 + i, 3) for i in range(4)]
        handles = [replicate(model, sync=name, comm=comm) for model in models]
        parameters = [p for model in models for p in model.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            if rank == 0:
                for i, model in enumerate(models):
                    model(torch.ones(2, 4 + i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.close()
        del junk
        return torch.cat([p.detach().flatten() for p in parameters])

    first, second = run_thread_ranks(work, 2)
    assert torch.equal(first, second)


def test_gradients_are_not_swapped_between_models() -> None:
    """Ranks that go through two models in different orders would add one's to the other's."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        models = [nn.Linear(3, 3) for _ in range(2)]
        handles = [replicate(model, sync="bucketed", comm=comm) for model in models]
        try:
            with pytest.raises(RunError, match="ranks synchronise different models"):
                models[rank](X).sum().backward()
        finally:
            for handle in handles:
                handle.close()

    run_thread_ranks(work, 2)


def test_sync_batch_norm_meets_once_a_backward_under_no_sync() -> None:
    """And so ranks may use different parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.c, self.d = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            hidden = self.norm(self.a(x))
            return self.c(hidden) + (self.d(hidden) if both else 0.0)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = Net()
        comm = ProcessGroupCommunicator(group)
        sync = replicate(model, sync="bucketed", comm=comm, batch_norm="sync")
        with sync.no_sync():
            model(X, rank == 0).square().sum().backward()
        model(X, rank == 0).square().sum().backward()
        sync.close()

    run_thread_ranks(work, 2)
