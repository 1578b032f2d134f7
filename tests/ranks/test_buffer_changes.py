"""Whose a buffer's change is: the user's between steps, a leaf's, or no leaf's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LEAVES = 6

Loop = Callable[[nn.Module, GradientSync, Communicator], Any]


def on_ranks(build: Callable[[], nn.Module], loop: Loop, world_size: int, **options: Any) -> list:
    """What `loop` returns on each rank."""

    def work(comm: Communicator) -> Any:
        model = build()
        sync = replicate(model, comm=comm, **{"batch_norm": "local", **options})
        try:
            return loop(model, sync, comm)
        finally:
            sync.close()

    if world_size == 1:
        return [work(SingleCommunicator())]
    return run_thread_ranks(
        lambda _, group: work(ProcessGroupCommunicator(group)), world_size, timeout_s=60
    )


def leaves(sync: GradientSync) -> Iterator[Tensor]:
    """This rank's leaves of a step."""
    mine = list(share(LEAVES, sync.comm.rank, sync.comm.world_size))
    for index in mine:
        with sync.micro_step(last=index == mine[-1], index=index):
            yield X.split(len(X) // LEAVES)[index]


def steps(
    model: nn.Module, sync: GradientSync, forward: Any = None, number: int = 3
) -> Iterator[int]:
    """Take steps; yields after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(number):
        for x in leaves(sync):
            sync.backward((forward or model)(x).square().sum(), weight=len(x), reduction="sum")
        sync.step(optimizer)
        yield step


def trains(model: nn.Module, sync: GradientSync, _: Communicator) -> dict[str, Tensor]:
    """A loop that only takes steps."""
    list(steps(model, sync))
    return state(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


def same_on_all(build: Callable[[], nn.Module], loop: Loop, **options: Any) -> dict[str, Tensor]:
    """Run on 1, 2 and 3 ranks: the same bits everywhere."""
    (alone,) = on_ranks(build, loop, 1, **options)
    for world_size in (2, 3):
        for found in on_ranks(build, loop, world_size, **options):
            assert_same(alone, found)
    return alone


def seeded(layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = layers()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model

    return build


class Factor(nn.Module):
    """Scales by a buffer that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


# -- between steps -------------------------------------------------------------------------------


def fill(buffer: Tensor, value: float) -> None:
    buffer.fill_(value)


def fill_data(buffer: Tensor, value: float) -> None:
    buffer.data.fill_(value)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
@pytest.mark.parametrize(
    ("how", "change"),
    [
        *product(["list", "parts", "compiled"], [fill, fill_data]),
        *product(["compiled sequence", "function"], [fill]),  # no hook sees writes past the version
    ],
)
def test_all_leaves_see_what_was_set_between_steps(how: str, change: Any) -> None:
    """Factor, and a running mean that forwards change too."""

    def layers() -> nn.Module:
        parts = [Factor(), nn.Linear(4, 1)]
        return nn.ModuleList(parts) if how == "list" else nn.Sequential(*parts)

    build = seeded(layers)

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        first = torch.compile(model[0], backend="eager") if how == "compiled" else model[0]

        def forward(x: Tensor) -> Tensor:
            return model(x) if how == "function" else model[1](first(x))

        if how == "function":
            forward = torch.compile(forward, backend="eager")
        elif how == "compiled sequence":
            forward = torch.compile(model, backend="eager")
        for number in range(3):
            change(model[0].factor, 2.0 + number)
            for x in leaves(sync):
                sync.backward(forward(x).square().sum(), weight=len(x), reduction="sum")
                assert model[0].factor == 2.0 + number
            sync.step(optimizer)
        return state(model)

    compiles = how.startswith(("compiled", "function"))
    try:
        worlds = (1,) if compiles else (1, 2, 3)
        found = [each for w in worlds for each in on_ranks(build, loop, w)]
    finally:
        if compiles:
            torch.compiler.reset()
    model: Any = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(3):
        model[0].factor.fill_(2.0 + number)
        optimizer.zero_grad()
        (model[1](model[0](X)).square().sum() / 12).backward()
        optimizer.step()
    for each in found:
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(each[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [fill, fill_data])
def test_a_buffer_that_forwards_move_may_be_set_between_steps(change: Any) -> None:
    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        for _ in steps(model, sync):
            change(model[1].running_mean, 5.0)
        before = model[0](X).detach()
        list(steps(model, sync, number=1))
        means = torch.stack([0.9 * 5 + 0.1 * part.mean(0) for part in before.split(2)])
        torch.testing.assert_close(model[1].running_mean, means.mean(0))
        return state(model)

    same_on_all(seeded(normed), loop)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("leafless", [False, True])
def test_a_change_on_one_rank_alone_is_refused(world_size: int, leafless: bool) -> None:
    """The last rank's; with or without a leaf there. No rank has updated its weights."""

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        last = comm.rank == comm.world_size - 1
        for number in range(2):
            if number and last:
                model.factor.fill_(7.0)
            before = [p.clone() for p in model.parameters()]
            if not (number and last and leafless):
                sync.backward(model(X).square().sum(), weight=12, reduction="sum")
            if number:
                with pytest.raises(ConfigError) as caught:
                    sync.step(optimizer)
                assert "'factor'" in str(caught.value)
                assert f"rank {world_size - 1} 7.0" in str(caught.value)
                assert all(map(torch.equal, before, model.parameters()))
            else:
                sync.step(optimizer)

    on_ranks(seeded(Factor), loop, world_size)


# -- no leaf's -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        *(("after steps", "no_grad"), ("after leaves", "inference")),
        *(("in leaves", "no_grad"), ("before steps", "inference")),
    ],
)
def test_forwards_without_gradients_leave_no_trace(where: str, mode: str) -> None:
    """On rank 0 alone, in training mode."""
    context = torch.no_grad if mode == "no_grad" else torch.inference_mode

    def loop_with(looks: bool) -> Loop:
        def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
            def look(here: str) -> None:
                if looks and here == where and comm.rank == 0:
                    with context():
                        model(X + 5)

            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(3):
                look("before steps")
                for x in leaves(sync):
                    loss = model(x).square().sum()
                    look("in leaves")
                    sync.backward(loss, weight=len(x), reduction="sum")
                    look("after leaves")
                sync.step(optimizer)
                want = state(model)
                look("after steps")
            return want

        return loop

    build = seeded(lambda: nn.Sequential(normed(), Codebook()))
    want = same_on_all(build, loop_with(False))
    for world_size in (1, 2, 3):
        for found in on_ranks(build, loop_with(True), world_size):
            assert_same(want, found)


class Codebook(nn.Module):
    """Moves its buffers as vector quantisation does: past their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4, 1))
        self.register_buffer("sizes", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sizes.data.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
            self.codes.data.copy_(0.9 * self.codes + x.detach().mean())
        return x + self.sizes.mean() + self.codes.mean()


def test_a_part_that_never_trains_is_moved_by_its_forwards() -> None:
    """A teacher's statistics, whose forward has no gradients and comes before the student's."""

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = model[1](x)
            out = model[0](x) - target
            with torch.no_grad():
                model[2](x)
            return out

        list(steps(model, sync, forward))
        assert model[1][1].num_batches_tracked == model[2][1].num_batches_tracked == 3
        return state(model)

    build = seeded(lambda: nn.ModuleList([normed(), normed(), normed()]))
    same_on_all(build, loop)


class Cache(nn.Module):
    """Keeps what it saw, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("last", torch.zeros(2, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.last = out.detach()
        self.calls += 1
        return out


def test_evaluation_on_one_rank_leaves_no_trace() -> None:
    """Not even a tensor of another shape; between two evaluations it stays."""

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        for _ in steps(model, sync, number=2):
            want = state(model)
            if comm.rank == 0:
                model.eval()
                with torch.no_grad():
                    out = model(X)
                assert torch.equal(model.last, out)
                assert model.calls == want["calls"] + 1
                model.train()
        return want

    same_on_all(seeded(Cache), loop)


# -- a leaf's ------------------------------------------------------------------------------------


class Batch(nn.Module):
    """Torch's batch_norm over buffers of its own, without a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training)


@pytest.mark.parametrize("layer", [Batch, lambda: nn.Sequential(nn.Linear(4, 1), Codebook())])
def test_writes_past_the_version_are_found(layer: Any) -> None:
    found = same_on_all(seeded(layer), trains)
    assert any(bool((found[name] != start).any()) for name, start in layer().named_buffers())


class Scaled(nn.Module):
    """Its graph holds a buffer that the forward has just changed, assigned or in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.alias = self.scale if how == "alias" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        new = 0.5 * self.scale + hidden.detach().abs().mean(0)
        old = self.scale
        if self.how == "assigned":
            self.scale = new
        elif self.how == "old in graph":
            self.scale = new
            return hidden / old
        else:
            self.scale.copy_(new)
        return hidden / (self.scale.view(1, 3) if self.how == "view" else self.scale)


def two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.square().sum().backward(retain_graph=True)
    out.sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("how", ["assigned", "in place", "old in graph", "alias", "view"])
@pytest.mark.parametrize("sync", ["invariant", "bucketed"])
def test_two_backwards_over_one_forward(how: str, sync: str) -> None:
    """The mean over ranks of plain torch's; or autograd says what was changed."""
    build = seeded(lambda: Scaled(how))
    inputs = [(1.0 + 4 * rank) * torch.ones(2, 4) for rank in range(3)]
    for world_size in (1, 2, 3):
        want = torch.stack([two_backwards(build(), x) for x in inputs[:world_size]]).mean(0)

        def loop(model: Any, _: Any, comm: Communicator) -> Tensor | None:
            try:
                found = two_backwards(model, inputs[comm.rank])
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                found = None
            assert how != "alias" or model.alias is model.scale
            return found

        for found in on_ranks(build, loop, world_size, strategy=sync):
            if found is None:
                assert how in ("alias", "view")
            else:
                torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


class Remembers(nn.Linear):
    """Assigns its output to a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_output_that_became_a_buffer_is_not_written(world_size: int) -> None:
    def loop(model: Any, sync: GradientSync, comm: Communicator) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            out = model(torch.full((2, 4), 1.0 + step + comm.rank))
            before = out.detach().clone()
            sync.backward(out.square().sum(), weight=2, reduction="sum")
            sync.step(optimizer)
            assert torch.equal(out.detach(), before)

    on_ranks(seeded(Remembers), loop, world_size)


class Views(nn.Module):
    """Refers to its buffer by a view and under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("both", torch.zeros(2, 4))
        self.first, self.alias = self.both[0], self.both

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.first.mul_(0.9).add_(out.detach().mean(0))
        return out + self.both.sum(0) + self.alias[0]


def test_views_aliases_and_snapshots_see_the_new_values() -> None:
    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        snapshot, tensor = model.state_dict(), model.both
        list(steps(model, sync))
        assert model.both is tensor
        for other in (snapshot["both"], model.alias):
            assert torch.equal(other, model.both)
        assert torch.equal(model.first, model.both[0])
        return state(model)

    same_on_all(seeded(Views), loop)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_is_one_leaf(reentrant: bool) -> None:
    """Its second forward runs inside of the backward."""

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        def forward(x: Tensor) -> Tensor:
            given = x.clone().requires_grad_()
            return model[1](checkpoint(model[0], given, use_reentrant=reentrant))

        list(steps(model, sync, forward, number=2))
        return state(model)

    build = seeded(lambda: nn.ModuleList([normed()[:2], nn.Linear(4, 1)]))
    found = same_on_all(build, loop)
    assert found["0.1.num_batches_tracked"] == 2 if reentrant else 4


def test_buffers_given_to_functional_call_are_the_callers() -> None:
    """For a forward beside the training: the model's own stay as they are."""

    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        average = {name: tensor.detach() + 1 for name, tensor in model.state_dict().items()}
        for _ in steps(model, sync):
            if comm.rank == 0:
                with torch.no_grad():
                    torch.func.functional_call(model.eval(), average, X)
                model.train()
        return state(model)

    same_on_all(seeded(normed), loop)


def test_own_loop_with_no_sync_and_a_spectral_norm() -> None:
    def loop(model: Any, sync: GradientSync, comm: Communicator) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            model[1].factor.fill_(1.0 + number)
            with sync.no_sync():
                model[1](model[0](X[:6])).sum().backward()
            model[1](model[0](X[6:])).sum().backward()
            assert model[1].factor == 1.0 + number
            optimizer.step()
            optimizer.zero_grad()
        return state(model)

    def layers() -> nn.Module:
        torch.manual_seed(3)
        return nn.ModuleList([nn.utils.spectral_norm(nn.Linear(4, 4)), Factor()])

    results = on_ranks(seeded(layers), loop, 2)
    assert_same(*results)
