"""Memory and gradients that the training script made itself: they count, or are refused by name.

Each program runs on one rank and on several and is compared with plain torch on the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import share_memory
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.sync_cases import NEEDS_MICRO_STEP, PERIODIC, on_handles, options_for
from support.thread_ranks import run_thread_ranks

X = torch.linspace(-1, 1, 48).view(12, 4)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])
own_loop = pytest.mark.parametrize("name", ["invariant", "bucketed", "naive"])
EVERY_ENGINE = [n for n in STRATEGIES if n not in (*NEEDS_MICRO_STEP, "fsdp", "hierarchical")]
"""All but torch's own, and one that needs hosts."""
FUSED = partial(torch.optim.Adam, lr=0.1, fused=True)


def drawn(model: nn.Module) -> Any:
    """The model with weights from a generator of its own: ranks are threads."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def linear() -> nn.Linear:
    return drawn(nn.Linear(4, 2))


def share_of(sync: GradientSync, x: Tensor = X) -> Tensor:
    return x[sync.comm.rank :: sync.comm.world_size]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


# -- strides ---------------------------------------------------------------------------------------


def channels_last() -> nn.Module:
    layers = drawn(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)))
    return layers.to(memory_format=torch.channels_last)


IMAGES = torch.linspace(-1, 1, 12 * 18).sin().view(12, 2, 3, 3)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(
    "name", [n for n in EVERY_ENGINE if n not in (*PERIODIC, "zero1", "zero2")]
)
@pytest.mark.parametrize("later", [False, True])
def test_a_fused_optimizer_of_channels_last_weights(name: str, later: bool) -> None:
    """It goes through weights and gradients by their memory, so these have the same strides."""

    def work(sync: GradientSync, _: Any) -> Tensor:
        if later:  # another memory format than when the model was replicated
            sync.model.to(memory_format=torch.channels_last)
        optimizer = FUSED(sync.model.parameters())
        for _ in range(3):
            leaves = share_of(sync, IMAGES).split(2)
            for number, leaf in enumerate(leaves):
                loss = (sync.model(leaf) - 1).square().sum()
                with sync.micro_step(last=number == len(leaves) - 1):
                    sync.backward(loss, weight=len(leaf), reduction="sum")
            sync.step(optimizer)
        return weights(sync.model)

    plain = channels_last()
    optimizer = FUSED(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((plain(IMAGES) - 1).square().sum() / 12).backward()
        optimizer.step()
    build = (lambda: channels_last().to(memory_format=torch.contiguous_format)) if later else None
    rtol = 0.1 if STRATEGIES[name].promise == "lossy" else 1e-3
    for found in on_handles(work, build or channels_last, strategy=name, **options_for(name)):
        torch.testing.assert_close(found, weights(plain), rtol=rtol, atol=rtol / 10)


# -- gradients in the script's own memory ----------------------------------------------------------


def flat_loop(model: nn.Module, x: Tensor, steps: int = 3, late: int | None = None) -> Tensor:
    """A loop whose gradients are views of one tensor, which it clears and clips itself; under
    no_sync (`late`: of this rank) there is no backward."""
    flat = torch.zeros(10)
    model.weight.grad, model.bias.grad = flat[:8].view(2, 4), flat[8:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        flat.zero_()
        (model(x) - 1).square().mean().backward()
        flat.mul_((1 / flat.norm()).clamp(max=1))
        optimizer.step()
    return torch.cat([weights(model), flat])


@own_loop
@world_sizes
def test_gradients_that_are_views_of_one_tensor(name: str, world_size: int) -> None:
    want = flat_loop(linear(), X)
    work = lambda sync, _: flat_loop(sync.model, share_of(sync))  # noqa: E731
    for found in on_handles(work, linear, world_size, strategy=name):
        torch.testing.assert_close(found, want)


@own_loop
def test_they_stay_there_on_a_rank_without_a_backward(name: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> tuple[list[float], bool]:
        kept = torch.zeros(2, 4)
        sync.model.weight.grad = kept
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            if sync.comm.rank == 0 or step == 0:
                sync.model(X).sum().backward()
            optimizer.step()
        return kept.flatten().tolist(), sync.model.weight.grad is kept

    found = on_handles(work, linear, strategy=name)
    half = (X.sum(0) / 2).repeat(2)
    for gradient, is_kept in found:
        torch.testing.assert_close(torch.tensor(gradient), half)
        assert is_kept


def written(model: nn.Module, rank: int, how: str) -> None:
    """Write a gradient from autograd.grad into `.grad`, which keeps its place."""
    x = torch.full((2, 4), 1.0 + rank)
    found = torch.autograd.grad((model(x) - 3).square().mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        {
            "copy_": parameter.grad.copy_,
            "replaced": lambda g, p=parameter: setattr(p, "grad", g),
            "foreach": lambda g, p=parameter: torch._foreach_copy_([p.grad], [g]),
        }[how](gradient)


@own_loop
@world_sizes
@pytest.mark.parametrize("how", ["copy_", "replaced", "foreach"])
def test_gradients_written_in_place_are_averaged(name: str, world_size: int, how: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> Tensor:
        for _ in range(3):
            written(sync.model, sync.comm.rank, how)
            optimizer.step()
        return weights(sync.model)

    plain = linear()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        copies = [copy.deepcopy(plain) for _ in range(world_size)]
        for rank, one in enumerate(copies):
            written(one, rank, "replaced")
        for parameter, *same in zip(*(m.parameters() for m in (plain, *copies)), strict=True):
            parameter.grad = torch.stack([each.grad for each in same]).mean(0)
        optimizer.step()
    for found in on_handles(work, linear, world_size, strategy=name):
        torch.testing.assert_close(found, weights(plain))


@own_loop
@world_sizes
def test_a_step_repeated_with_clipped_gradients(name: str, world_size: int) -> None:
    """They were written to between backward and step: that is not a gradient of the next step."""

    def loop(model: nn.Module, x: Tensor, optimizer: Any) -> Tensor:
        (model(x) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.step()
        return weights(model)

    plain = linear()
    want = loop(plain, X, torch.optim.SGD(plain.parameters(), lr=0.1))
    work = lambda sync, optimizer: loop(sync.model, share_of(sync), optimizer)  # noqa: E731
    for found in on_handles(work, linear, world_size, strategy=name):
        torch.testing.assert_close(found, want)


# -- gradients that sync.backward did not make -----------------------------------------------------


def by_penalty(model: Any) -> None:
    (3 * model.weight.square().sum()).backward()


def by_hand(model: Any) -> None:
    model.bias.grad = torch.ones(2)


@pytest.mark.parametrize("name", EVERY_ENGINE)
@pytest.mark.parametrize(
    ("world_size", "make", "leaves"), [(1, by_hand, 1), (2, by_hand, 0), (2, by_penalty, 1)]
)
def test_they_are_refused_before_and_between_leaves(
    name: str, world_size: int, make: Callable[[Any], None], leaves: int
) -> None:
    def work(sync: GradientSync, optimizer: Any) -> None:
        sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
        sync.step(optimizer)  # what is left of a step is no obstacle to the next one
        for _ in range(leaves):
            sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
        before = weights(sync.model)

        def go_on() -> None:
            make(sync.model)
            sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
            sync.step(optimizer)

        with pytest.raises(ConfigError, match=r"sync.backward\(\)"):
            go_on()
        assert torch.equal(before, weights(sync.model))

    on_handles(work, linear, world_size, strategy=name, **options_for(name))


# -- parameters outside of the model ---------------------------------------------------------------


@own_loop
@pytest.mark.parametrize(("world_size", "own"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("kind", [nn.Parameter, lambda t: t.requires_grad_()])
def test_an_optimizer_of_their_own_is_refused(
    name: str, world_size: int, own: bool, kind: Callable[[Tensor], Tensor]
) -> None:
    """Its gradients are one rank's; in its first step it is not known where they came from."""

    def work(sync: GradientSync, optimizer: Any) -> None:
        factor = kind(torch.tensor([0.5, 2.0]))
        apart = torch.optim.SGD([factor], lr=0.1)
        for step in range(2):
            loss = (sync.model(X) * factor).square().sum()
            loss.backward() if own else sync.backward(loss, weight=12, reduction="sum")
            if not own:  # in the loss of the first leaf alone
                sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
            optimizer.step() if own else sync.step(optimizer)
            if step:
                said = r"outside of it.*\(group 0: \[2\]\).*ModuleList"
                with pytest.raises(ConfigError, match=said):
                    apart.step()
                return
            apart.step()
            optimizer.zero_grad(), apart.zero_grad()

    on_handles(work, linear, world_size, strategy=name)


@own_loop
def test_a_model_trained_by_backwards_of_its_own_is_not(name: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> None:
        probe = nn.Linear(2, 1)
        apart = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(3):
            out = sync.model(X)
            out.sum().backward()
            optimizer.step()
            probe(out.detach()).sum().backward()
            apart.step()

    on_handles(work, linear, strategy=name)


# -- memory of parameters --------------------------------------------------------------------------


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda scale: scale.data,
    "slice": lambda scale: scale[:2].detach(),
    "to an array": lambda scale: scale.detach().numpy(),
}


class Aliased(nn.Module):
    """`scale`, and one other way to the same memory: each alone, as one may hide another."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        array = torch.ones(3).numpy()
        ones = torch.from_numpy(array) if alias == "of an array" else torch.ones(3)
        self.scale, self.offset = nn.Parameter(ones), nn.Parameter(torch.zeros(3))
        self.other = array if alias == "of an array" else ALIASES[alias](self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x + self.offset).sum(1)


@pytest.mark.parametrize("alias", [*ALIASES, "of an array"])
@pytest.mark.parametrize("name", ["invariant", "bucketed"])
def test_other_ways_to_a_parameters_memory_follow_it(name: str, alias: str) -> None:
    def on_rank(_: int, group: dist.ProcessGroup) -> None:
        comm = share_memory(ProcessGroupCommunicator(group))
        model = Aliased(alias)
        sync = replicate(model, comm=comm, strategy=name, collective="shared_memory")
        later = model.scale.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sync.backward(model(X[:, :3]).sum(), weight=12, reduction="sum")
            sync.step(optimizer)
        sync.close()
        with torch.no_grad():
            model.scale.add_(1.0)
        now = model.scale.tolist()
        assert now != [2.0, 2.0, 2.0]
        for other in (model.other, later):
            assert other.tolist() == now[: len(other)]

    run_thread_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["invariant", "bucketed"])
def test_memory_that_parameters_got_later_follows_them(name: str) -> None:
    """As `vector_to_parameters` makes it, or a script that keeps one flat tensor."""

    def trained(group: dist.ProcessGroup | None) -> tuple[list[float], list[float]]:
        model, options = linear(), {"strategy": name}
        if group is not None:
            options |= {"comm": share_memory(ProcessGroupCommunicator(group))}
            options |= {"collective": "shared_memory"}
        sync = replicate(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        for step in range(4):
            if step == 1:
                torch.nn.utils.vector_to_parameters(flat, model.parameters())
            flat.mul_(0.5)
            sync.backward(model(X).square().sum(), weight=12, reduction="sum")
            sync.step(optimizer)
        sync.close()
        return weights(model).tolist(), flat.tolist()

    alone = trained(None)
    assert alone[0] == alone[1]
    assert run_thread_ranks(lambda _, group: trained(group), 2) == [alone] * 2


def test_memory_shared_between_processes_is_refused() -> None:
    """As torch.multiprocessing.spawn hands a model to its processes; one rank may have it."""

    def build() -> nn.Module:
        model = nn.BatchNorm1d(4)
        model.weight.data.share_memory_()
        return model

    def work(world_size: int) -> None:
        on_handles(lambda *_: None, build, world_size, strategy="naive", batch_norm="freeze")

    work(1)
    said = r"parameter 'weight'.*memory that processes share.*deepcopy"
    with pytest.raises(ConfigError, match=said):
        work(2)


# -- the scaler, the loss, numbers -----------------------------------------------------------------


@pytest.mark.parametrize("given", ["to backward only", "to step only", "to one leaf", "another"])
def test_a_scaler_is_given_to_all_of_a_step(given: str) -> None:
    def work(sync: GradientSync, optimizer: Any) -> None:
        scaler, other = (torch.amp.GradScaler("cpu") for _ in range(2))
        first = None if given == "to step only" else scaler
        last = {"to step only": scaler, "another": other}.get(given)

        def go_on() -> None:
            sync.backward(sync.model(X).sum(), weight=12, scale=first, reduction="sum")
            if given == "to one leaf":
                sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
            sync.step(optimizer, scale=last)

        with pytest.raises(ConfigError, match="scale="):
            go_on()
        sync.discard()
        sync.backward(sync.model(X).sum(), weight=12, reduction="sum")
        sync.step(optimizer)

    on_handles(work, linear, 1, strategy="bucketed")


# -- what the model and its optimizers became ------------------------------------------------------


@own_loop
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_an_optimizer_that_steps_inside_of_backward(name: str, world_size: int, own: bool) -> None:
    """One optimizer for each parameter, stepped by a hook: before anything was averaged."""

    def work(sync: GradientSync, optimizer: Any) -> None:
        apart = {p: torch.optim.SGD([p], lr=0.1) for p in sync.model.parameters()}
        for parameter in apart:
            parameter.register_post_accumulate_grad_hook(lambda p: apart[p].step())
        loss, before = sync.model(X).sum(), weights(sync.model)
        with pytest.raises(ConfigError, match=r"during a backward, by a hook .*sync.step\(\["):
            loss.backward() if own else sync.backward(loss, weight=12, reduction="sum")
        assert torch.equal(before, weights(sync.model))
        sync.discard()

    on_handles(work, linear, world_size, strategy=name)
