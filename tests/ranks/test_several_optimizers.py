"""Several optimizers over one model in one step, and several steps over one batch, as GANs need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from support.engine_cases import bits, global_random_state, raw
from support.sync_cases import on_handles
from support.thread_ranks import run_thread_ranks

LEAVES = 5

Make = Callable[[nn.Module], list[Optimizer]]


def net() -> nn.Sequential:
    with global_random_state:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.02)]


def adam_and_sgd(model: nn.Sequential) -> list[Optimizer]:
    first, last = model[0].parameters(), model[2].parameters()
    return [torch.optim.Adam(first, lr=0.02), torch.optim.SGD(last, lr=0.05, momentum=0.9)]


def x_of(step: int, leaf: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + leaf))


def leaves_of(comm: Communicator) -> list[tuple[int, bool]]:
    """(index, whether it is the last) of this rank's."""
    mine = share(LEAVES, comm.rank, comm.world_size)
    return [(index, index == mine[-1]) for index in mine]


def on_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    if world_size == 1:
        return [work(SingleCommunicator())]
    return run_thread_ranks(lambda _, group: work(ProcessGroupCommunicator(group)), world_size)


# -- one step of all -------------------------------------------------------------------------------


def train(
    comm: Communicator,
    make: Make,
    steps: Sequence[int],
    saved: list[Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Weights and the state of each optimizer and scheduler, whole, as a user would save them."""
    model = net()
    sync = replicate(model, comm=comm, **options)
    optimizers = make(model)
    parts = [*optimizers, *(StepLR(optimizer, 1, 0.5) for optimizer in optimizers)]
    if saved is not None:
        for part, state in zip([model, *parts], saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        for optimizer in optimizers:
            sync.replica.scatter(optimizer)
    for step in steps:
        for index, last in leaves_of(comm):
            with sync.micro_step(last=last, index=index):
                sync.backward(
                    sync.forward(x_of(step, index)).square().sum(), weight=3, reduction="sum"
                )
        sync.step(optimizers, clip_norm=0.5)
        for scheduler in parts[len(optimizers) :]:
            scheduler.step()
        assert all(parameter.grad is None for parameter in model.parameters())
    for optimizer in optimizers:
        held = sync.replica.sharded_state_dict(optimizer)
        if held is not None:  # each rank's share, into a checkpoint and back
            states = {p: copy.deepcopy(state) for p, (_, state) in held.items()}
            sync.replica.scatter(optimizer, states)
        sync.replica.gather(optimizer)
    found = copy.deepcopy([part.state_dict() for part in (model, *parts)])
    for optimizer in optimizers:
        sync.replica.scatter(optimizer)
    sync.close()
    return found


@pytest.mark.parametrize(
    ("sync", "make"),
    [("invariant", muon_and_adamw), ("invariant", adam_and_sgd), ("zero1", adam_and_sgd)],
)
@pytest.mark.parametrize("collective", ["shared_memory", "backend"])
def test_a_saved_run_goes_on_at_another_world_size(sync: str, make: Make, collective: str) -> None:
    """W = 2 saves, W = 3 goes on: the bits of W = 1, undisturbed."""
    options = {"strategy": sync, "collective": collective}
    begun = on_ranks(2, lambda comm: train(comm, make, [0, 1], **options))[1]
    ended = on_ranks(3, lambda comm: train(comm, make, [2, 3], saved=begun, **options))
    alone = train(SingleCommunicator(), make, range(4))
    assert [bits(found) for found in ended] == [bits(alone)] * 3


@pytest.mark.parametrize("make", [muon_and_adamw, adam_and_sgd])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_gradient_scaler_skips_all_or_none(make: Make, failing: int) -> None:
    """The gradient of one rank's one leaf overflows, in parameters of one of the optimizers."""

    def work(comm: Communicator) -> tuple[list[Tensor], list[bool], float]:
        model = net()
        sync = replicate(model, comm=comm)
        optimizers = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        held = [p for group in optimizers[failing].param_groups for p in group["params"]]
        moved = []
        for step in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            for index, last in leaves_of(comm):
                loss = model(x_of(step, index)).square().sum()
                if (step, index) == (1, LEAVES - 1):
                    loss = loss + held[0].sum() * float("inf")
                with sync.micro_step(last=last, index=index):
                    sync.backward(loss, weight=3, scale=scaler, reduction="sum")
            sync.step(optimizers, clip_norm=0.5, scale=scaler)
            pairs = zip(before, model.parameters(), strict=True)
            moved += [not torch.equal(old, new) for old, new in pairs]
        sync.close()
        return list(map(raw, before)), moved, scaler.get_scale()

    alone = work(SingleCommunicator())
    assert alone[1:] == ([True] * 4 + [False] * 4 + [True] * 4, 512.0)
    assert on_ranks(3, work) == [alone] * 3


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m, o: [o[0], torch.optim.SGD([m[2].weight], lr=0.1), o[1]], "'2.weight' is in two"),
        (lambda m, o: [o[0], o[0]], "'0.weight' is in two of the optimizers"),
        (lambda m, o: [], "at least one optimizer, got an empty list"),
    ],
)
def test_what_is_no_list_of_optimizers(wrong: Any, message: str) -> None:
    model = net()
    sync = replicate(model, comm=SingleCommunicator())
    sync.backward(model(x_of(0, 0)).square().sum(), weight=3, reduction="sum")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        sync.step(wrong(model, adam_and_sgd(model)))
    assert bits(model.state_dict()) == bits(before)
    sync.close()


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_muon_cannot_be_shared_out(name: str) -> None:
    def work(sync: GradientSync, _: Any) -> str:
        sync.backward(sync.model(x_of(0, sync.comm.rank)).square().sum(), weight=3, reduction="sum")
        with pytest.raises(ConfigError) as caught:
            sync.step(muon_and_adamw(sync.model))
        return str(caught.value)

    for message in on_handles(work, net, strategy=name):
        assert "Muon is not known to be elementwise" in message
        assert "strategy='invariant'" in message


def test_ranks_that_differ_in_one_of_them() -> None:
    def work(sync: GradientSync, _: Any) -> None:
        rank = sync.comm.rank
        optimizers = adam_and_sgd(sync.model)
        optimizers[1].param_groups[0]["lr"] = 0.1 * (rank + 1)
        sync.backward(sync.model(x_of(0, rank)).square().sum(), weight=3, reduction="sum")
        with pytest.raises(ConfigError, match=r"lr of group 0 of optimizer 1 differs: rank 0 0.1"):
            sync.step(optimizers)

    on_handles(work, net)


# -- several steps over one batch ------------------------------------------------------------------

CRITIC_STEPS = 2


class Gan:
    """A generator, a critic with running statistics, and their losses."""

    def __init__(self) -> None:
        with global_random_state:
            torch.manual_seed(3)
            self.generator = nn.Linear(6, 4)
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic_by = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
        self.generator_by = torch.optim.Adam(self.generator.parameters(), lr=0.02)

    def critic_loss(self, x: Tensor, *, detach: bool) -> Tensor:
        """The critic's loss; without `detach` the generator gets unwanted gradients too."""
        made = self.generator(x)
        return F.softplus(self.critic(made.detach() if detach else made)).sum()

    def generator_loss(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(x))).sum()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for m in (self.generator, self.critic) for p in m.parameters()]


def train_gan(comm: Communicator, name: str, *, handles: int, **options: Any) -> list[Tensor]:
    gan = Gan()
    models = (
        [gan.generator, gan.critic]
        if handles == 2
        else [nn.ModuleList([gan.generator, gan.critic])]
    )
    syncs = [replicate(model, strategy=name, comm=comm, **options) for model in models]
    generator, critic = syncs[0], syncs[-1]
    for step in range(3):
        for turn in range(CRITIC_STEPS):
            for index, last in leaves_of(comm):
                with critic.micro_step(last=last, index=index):
                    loss = gan.critic_loss(x_of(2 * step + turn, index), detach=handles == 2)
                    critic.backward(loss, weight=3, reduction="sum")
            critic.step(gan.critic_by, clip_norm=0.1)
        for index, last in leaves_of(comm):
            with generator.micro_step(last=last, index=index):
                generator.backward(gan.generator_loss(x_of(step, index)), weight=3, reduction="sum")
        generator.step(gan.generator_by, clip_norm=0.1)
        assert all(p.grad is None for m in models for p in m.parameters())
    for sync in syncs:
        sync.close()
    return gan.weights()


def train_gan_plainly() -> list[Tensor]:
    gan = Gan()
    for step in range(3):
        for turn in range(CRITIC_STEPS):
            gan.critic_by.zero_grad()
            for index in range(LEAVES):
                loss = gan.critic_loss(x_of(2 * step + turn, index), detach=True)
                (loss / (3 * LEAVES)).backward()
            nn.utils.clip_grad_norm_(gan.critic.parameters(), 0.1)
            gan.critic_by.step()
        gan.generator_by.zero_grad()
        for index in range(LEAVES):
            (gan.generator_loss(x_of(step, index)) / (3 * LEAVES)).backward()
        nn.utils.clip_grad_norm_(gan.generator.parameters(), 0.1)
        gan.generator_by.step()
    return gan.weights()


@pytest.mark.parametrize("handles", [1, 2])
@pytest.mark.parametrize(
    ("name", "collective"),
    [
        *((name, "shared_memory") for name in ("invariant", "bucketed", "zero1", "zero2")),
        *((name, "backend") for name in ("invariant", "zero2", "naive")),
    ],
)
def test_a_gan(name: str, collective: str, handles: int) -> None:
    """Each optimizer uses and clips its own gradients only, and none of another turn."""
    options = {} if name == "naive" else {"collective": collective}
    alone = train_gan(SingleCommunicator(), name, handles=handles)
    for plain, found in zip(train_gan_plainly(), alone, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    for world_size in (2, 3):
        for found in on_ranks(
            world_size, lambda comm: train_gan(comm, name, handles=handles, **options)
        ):
            if STRATEGIES[name].promise == "bitwise":
                assert bits(found) == bits(alone)
            for left, right in zip(found, alone, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def two_handles(**options: Any) -> tuple[Gan, GradientSync, GradientSync]:
    gan = Gan()
    comm = SingleCommunicator()
    generator = replicate(gan.generator, comm=comm, **options)
    return gan, generator, replicate(gan.critic, comm=comm, **options)


@pytest.mark.parametrize("name", ["invariant", "naive", "zero1", "local_sgd"])
def test_a_backward_of_another_handle_in_mid_step(name: str) -> None:
    gan, generator, critic = two_handles(strategy=name)
    critic.backward(gan.critic_loss(x_of(0, 0), detach=True), weight=3, reduction="sum")
    with pytest.raises(ConfigError, match=r"its own backward and its step.*ModuleList\(\[a, b\]"):
        generator.backward(gan.generator_loss(x_of(0, 0)), weight=3, reduction="sum")
    for sync in (generator, critic):
        sync.close()


@pytest.mark.parametrize("name", ["invariant", "naive"])
def test_a_model_that_only_another_handle_trains(name: str) -> None:
    """An encoder and a head under two handles: the encoder would never learn anything."""
    gan, generator, critic = two_handles(strategy=name)
    critic.backward(gan.critic_loss(x_of(0, 0), detach=False), weight=3, reduction="sum")
    critic.step(gan.critic_by)
    with pytest.raises(ConfigError, match=r"another handle's sync.backward.*ModuleList"):
        gan.generator_by.step()
    with pytest.raises(ConfigError, match=r"without a backward on any rank .* one handle"):
        generator.step(gan.generator_by)
    gan.generator(x_of(0, 0)).sum().backward()
    with pytest.raises(ConfigError, match=r"between its own backward and its step"):
        critic.backward(gan.critic_loss(x_of(0, 0), detach=False), weight=3, reduction="sum")
    for sync in (generator, critic):
        sync.close()


@pytest.mark.parametrize("name", ["invariant", "naive"])
def test_statistics_of_a_model_that_another_handle_uses(name: str) -> None:
    """A critic's BatchNorm learns from the critic's own backwards, however leaves are dealt."""

    def work(comm: Communicator) -> Tensor:
        gan = Gan()
        gan.critic.append(nn.BatchNorm1d(1))
        handles = {"strategy": name, "comm": comm}
        generator = replicate(gan.generator, **handles)
        critic = replicate(gan.critic, batch_norm="local", **handles)
        for step in range(2):
            for index, last in leaves_of(comm):
                with generator.micro_step(last=last, index=index):
                    generator.backward(
                        gan.generator_loss(x_of(step, index)), weight=3, reduction="sum"
                    )
            generator.step(gan.generator_by)
            for index, last in leaves_of(comm):
                with critic.micro_step(last=last, index=index):
                    critic.backward(
                        gan.critic_loss(x_of(step, index), detach=True), weight=3, reduction="sum"
                    )
            critic.step(gan.critic_by)
        for sync in (generator, critic):
            sync.close()
        assert int(gan.critic[3].num_batches_tracked) == 2
        return gan.critic[3].running_var

    alone = work(SingleCommunicator())
    for found in on_ranks(2, work):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=0.0)
