"""Programs that go wrong with other trainers: here each is right, or says what is wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import MicroBatch
from support.sync_cases import on_handles

every_engine = pytest.mark.parametrize("name", ["invariant", "bucketed"])
every_strategy = pytest.mark.parametrize("name", ["invariant", "bucketed", "naive"])


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

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.left = [0]

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
def test_a_parameter_that_outlives_its_model_says_so(name: str) -> None:
    model = two_layers()
    weight = model[0].weight
    alone(model, strategy=name)
    del model
    gc.collect()
    with pytest.raises(ConfigError, match=r"and its handle, are gone: keep the model, or call"):
        weight.sum().backward()


@every_strategy
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("change", ["replaced", "replaced under its optimizer", "unfrozen"])
def test_parameters_that_came_too_late_are_named(name: str, own: bool, change: str) -> None:
    """An optimizer that still holds the old ones would train nothing."""
    model = two_layers()
    model[0].requires_grad_(change != "unfrozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = alone(model, strategy=name)
    if change == "unfrozen":
        model[0].requires_grad_(True)
    else:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    if change == "replaced":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(X).sum()
    loss.backward() if own else sync.backward(loss, weight=4, reduction="sum")
    said = r"parameter '0.weight' was replaced or became trainable after gs.replicate"
    with pytest.raises(ConfigError, match=said):
        optimizer.step() if own else sync.step(optimizer)
    sync.close()


def test_parameters_frozen_later_are_left_alone() -> None:
    model = two_layers()
    sync = alone(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    sync.step(optimizer)
    assert torch.equal(model[0].weight, before)
    sync.close()


@every_strategy
@pytest.mark.parametrize("part", [True, False])
def test_a_parameter_has_one_handle(name: str, part: bool) -> None:
    model = two_layers()
    whole, other = (model, model[1]) if part else (model[1], model)
    sync = alone(whole, strategy=name)
    said = "'weight'" if part else "'1.weight'"
    with pytest.raises(ConfigError, match=rf"parameter {said} .* replicated already; call close"):
        alone(other)
    sync.close()
    alone(other).close()


@every_engine
def test_another_dtype_is_named(name: str) -> None:
    model = two_layers()
    sync = alone(model, strategy=name)
    model.double()
    with pytest.raises(ConfigError, match=r"'1\..*was torch.float32 when the model was replicated"):
        sync.backward(model(X.double()).sum(), weight=4, reduction="sum")
    sync.close()


@every_engine
@pytest.mark.parametrize("own", [True, False])
def test_parameters_outside_of_the_model_are_named(name: str, own: bool) -> None:
    """A learned weight of a loss: each rank would update it by its own gradient."""
    model, factor = two_layers(), nn.Parameter(torch.tensor([0.5, 2.0]))
    sync = alone(model, strategy=name)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [factor]}], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    loss = (model(X) * factor).square().sum()
    said = r"parameters outside of the replicated model \(group 1: \[2\]\)"
    loss.backward() if own else sync.backward(loss, weight=4, reduction="sum")
    with pytest.raises(ConfigError, match=said):
        optimizer.step() if own else sync.step(optimizer)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    sync.discard()
    apart = [torch.optim.SGD(held, lr=0.1) for held in (model.parameters(), [factor])]
    if own:
        model(X).sum().backward()
        apart[0].step()
    else:
        sync.backward(model(X).sum(), weight=4, reduction="sum")
        sync.step(apart[0])
    apart[1].step()  # the program's alone
    sync.close()


# -- two ways of stepping, mixed -------------------------------------------------------------------


Program = Callable[[nn.Sequential, GradientSync, torch.optim.Optimizer], object]
"""(model, its handle, an SGD over all of it): ends with what is refused."""
REFUSED: dict[str, tuple[Program, str]] = {}


@every_engine
def test_an_optimizer_over_another_model(name: str) -> None:
    """Nor may it stand beside one that is right."""
    model, other = two_layers(), nn.Linear(3, 5)
    sync = alone(model, strategy=name)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    with pytest.raises(ConfigError, match=r"none of this model's.*\(group 0: \[5, 3\], \[5\]\)"):
        sync.step(optimizers)
    sync.close()


def refused(message: str) -> Callable[[Program], Program]:
    def enter(program: Program) -> Program:
        REFUSED[program.__name__] = program, message
        return program

    return enter


@refused(r"loss.backward\(\) is followed by optimizer.step\(\)")
def sync_step_after_loss_backward(model: Any, sync: GradientSync, optimizer: Any) -> None:
    model(X).sum().backward()
    sync.step(optimizer)


@refused(r"sync.backward\(\) is followed by sync.step\(optimizer\), not by optimizer.step")
def optimizer_step_after_sync_backward(model: Any, sync: GradientSync, optimizer: Any) -> None:
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    optimizer.step()


@refused(r"a backward that is not sync.backward\(\) reached")
def loss_backward_after_sync_backward(model: Any, sync: GradientSync, optimizer: Any) -> None:
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    model(X).sum().backward()


@refused(r"sync.backward\(\) is followed by sync.step\(optimizer\).* sync.finish")
def finish_after_sync_backward(model: Any, sync: GradientSync, optimizer: Any) -> None:
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    sync.finish()


@refused(r"without a backward on any rank .* sync.step\(\[a, b\]\)")
def a_second_step_for_a_second_optimizer(model: Any, sync: GradientSync, _: Any) -> None:
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    sync.step(first)
    sync.step(second)


@every_strategy
@pytest.mark.parametrize("program", REFUSED)
def test_ways_of_stepping_are_not_mixed(name: str, program: str) -> None:
    model = two_layers()
    sync = alone(model, strategy=name)
    run, message = REFUSED[program]
    with pytest.raises(ConfigError, match=message):
        run(model, sync, torch.optim.SGD(model.parameters(), lr=0.1))
    sync.close()


@every_strategy
def test_plain_backwards_in_micro_step_are_refused(name: str) -> None:
    """Uneven shares: each backward would be a step of its own, and ranks would pair different
    ones."""

    def work(sync: GradientSync, _: Any) -> str:
        last = sync.comm.rank == 2
        with sync.micro_step(last=last), pytest.raises(ConfigError) as caught:
            sync.model(X).sum().backward()
        return str(caught.value)

    for said in on_handles(work, two_layers, 3, strategy=name):
        assert "Write sync.backward(loss, micro_batch) there and sync.step(optimizer)" in said


@every_engine
@pytest.mark.parametrize("collective", ["auto", "backend"])
def test_a_skipped_step_is_named(name: str, collective: str) -> None:
    def work(sync: GradientSync, _: Any) -> None:
        first = 2 * sync.comm.rank
        for leaf in (MicroBatch(first, False, 4), MicroBatch(first + 1, True, 4)):
            sync.backward(sync.model(X).sum(), leaf, reduction="sum")
        loss = sync.model(X).sum()
        with pytest.raises(ConfigError, match=r"sync.step\(\) was not called in between"):
            sync.backward(loss, MicroBatch(first, False, 4), reduction="sum")

    on_handles(work, two_layers, strategy=name, collective=collective)


@pytest.mark.parametrize("name", ["bucketed", "naive", "flat", "zero2"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("then", ["backward", "step"])
def test_gradients_cleared_within_a_step_are_named(name: str, to_none: bool, then: str) -> None:
    """The last leaf alone would count, divided by the weight of all."""
    model = two_layers()
    sync = alone(model, strategy=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    sync.backward(model(X).sum(), weight=4, reduction="sum")
    optimizer.zero_grad(set_to_none=to_none)
    if then == "backward":
        with pytest.raises(ConfigError, match=r"cleared or replaced between sync\.backward"):
            sync.backward(model(X).sum(), weight=4, reduction="sum")
    elif to_none:
        with pytest.raises(ConfigError, match=r"cleared or replaced between sync\.backward"):
            sync.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    sync.close()


@every_strategy
def test_gradients_that_no_optimizer_uses_do_not_add_up(name: str) -> None:
    model = two_layers()
    sync = alone(model, strategy=name)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
    norms = []
    for _ in range(3):
        sync.backward(model(X).sum(), weight=4, reduction="sum")
        norms.append(float(sync.step(optimizer, clip_norm=1.0).grad_norm))
    assert norms[0] == norms[1] == norms[2]
    sync.close()


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 1) for name, strategy in STRATEGIES.items() if strategy.needs_group),
        *(("ddp", 2), ("powersgd", 2)),  # fsdp wants processes
    ],
)
def test_a_leaf_outside_of_micro_step_is_refused_where_it_matters(
    name: str, world_size: int
) -> None:
    """`ddp` and `powersgd` would sum whole gradients after backward, as `naive` does."""

    def work(sync: GradientSync, _: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            sync.backward(sync.model(X).sum(), weight=2, reduction="sum")
        return str(caught.value)

    for said in on_handles(work, two_layers, world_size, strategy=name):
        assert said.startswith(
            f"strategy='{name}': enclose forward and backward of each micro-batch in `with"
        )


@pytest.mark.parametrize(
    ("weight", "clip_norm", "message"),
    [
        (float("nan"), None, "finite number >= 0, got nan"),
        (float("inf"), None, "finite number >= 0, got inf"),
        (-3.0, None, "finite number >= 0, got -3"),
        (4, -1.0, "clip_norm must be a number >= 0"),  # it would ascend
        (4, float("nan"), "clip_norm must be a number >= 0"),
    ],
)
def test_arguments_that_cannot_be_meant(weight: float, clip_norm: Any, message: str) -> None:
    model = two_layers()
    sync = alone(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    total = model(X).sum()

    def go_on() -> None:
        sync.backward(total, weight=weight, reduction="sum")
        sync.step(optimizer, clip_norm=clip_norm)

    with pytest.raises(ConfigError, match=message):
        go_on()
    sync.close()


def test_a_closed_handle_says_so() -> None:
    model = two_layers()
    sync = alone(model)
    sync.close()
    sync.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: sync.backward(model(X).sum(), weight=4, reduction="sum"),
        lambda: sync.step(optimizer),
        sync.finish,
        sync.no_sync().__enter__,
        sync.discard,
    ):
        with pytest.raises(ConfigError, match="this handle is closed"):
            call()


AGAIN = (0, 1, 1, 2, 3)
"""Steps of a run whose second one is discarded."""

# -- a backward that raises ------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("failing_leaf", [0, 1])
def test_a_failed_backward_is_thrown_away(
    name: str, failing: tuple[int, ...], failing_leaf: int
) -> None:
    """One of two leaves fails in the second of four steps; that step is done again."""

    def work(
        sync: GradientSync, optimizer: Any, steps: tuple[int, ...]
    ) -> tuple[Tensor, list[bool]]:
        model, rank = sync.model, sync.comm.rank
        discarded = []
        for step in steps:
            try:
                for leaf in range(2):
                    fails = steps == AGAIN and len(discarded) == 1 and rank in failing
                    model.left[0] = int(fails and leaf == failing_leaf)
                    with sync.micro_step(last=leaf == 1, index=2 * rank + leaf):
                        loss = model(X * (step + rank + leaf)).square().sum()
                        sync.backward(loss, weight=4, reduction="sum")
            except FloatingPointError:
                with pytest.raises(ConfigError, match=r"call sync.discard\(\) in place of step"):
                    sync.backward(model(X).sum(), weight=1, reduction="sum")
                sync.discard()
                discarded.append(True)
            else:
                discarded.append(sync.step(optimizer).discarded)
        return model.a.weight.detach(), discarded

    expected, _ = on_handles(partial(work, steps=(0, 1, 2, 3)), Fragile, strategy=name)[0]
    for weight, discarded in on_handles(partial(work, steps=AGAIN), Fragile, strategy=name):
        assert discarded == [False, True, False, False, False]
        assert torch.equal(weight, expected)


@every_strategy
def test_a_failed_backward_in_a_loop_of_ones_own(name: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> tuple[Tensor, Tensor | None]:
        model, rank = sync.model, sync.comm.rank
        model.left[0] = int(rank == 1)
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
        return model.a.weight.grad.clone(), lost

    grads = []
    for rank in range(2):
        model = Fragile()
        model(X * (rank + 1)).square().sum().backward()
        grads.append(model.a.weight.grad)
    for gradient, lost in on_handles(work, Fragile, strategy=name):
        assert lost is None
        torch.testing.assert_close(gradient, (grads[0] + grads[1]) / 2)


@every_strategy
@pytest.mark.parametrize("own", [True, False])
def test_a_rank_whose_forward_failed_discards(name: str, own: bool) -> None:
    """In the first step, before anything tells which of the two ways the program goes."""

    def work(sync: GradientSync, optimizer: Any) -> Tensor:
        model, rank = sync.model, sync.comm.rank
        before = model[0].weight.detach().clone()
        if rank == 1:
            sync.discard()
        elif own:
            model(X).square().sum().backward()
            optimizer.step()
        else:
            sync.backward(model(X).square().sum(), weight=4, reduction="sum")
            assert sync.step(optimizer).discarded
        return model[0].weight.detach() - before

    for moved in on_handles(work, two_layers, strategy=name):
        assert not moved.any()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_fsdp_refuses_weights_that_a_forward_changes(kind: type[nn.Module]) -> None:
    """FSDP2 changes a copy of them, and drops it: other weights on two ranks than on one."""
    model = nn.Sequential(kind(8, 4, max_norm=0.5))
    with pytest.raises(ConfigError, match="max_norm"):
        replicate(model, comm=SingleCommunicator(), strategy="fsdp")
    replicate(nn.Sequential(kind(8, 4)), comm=SingleCommunicator(), strategy="fsdp").close()
