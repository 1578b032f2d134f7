"""The sharded optimizer where pieces are not all there is, and where it must say no."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.build import build_engine
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import Recipe
from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer
from support.thread_ranks import run_thread_ranks

INVARIANT = Recipe(order="invariant", bucket_mb=0.0002)
ZERO1 = Recipe(order="invariant", shard="optimizer", bucket_mb=0.0002)
ZERO2 = Recipe(shard="gradients", bucket_mb=0.0002)
MORE_THAN_A_GRAIN = 70_003
_RANDOM = threading.Lock()

State = dict[Any, dict[str, Any]]


def on_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """`work(comm)` on every rank."""
    return run_thread_ranks(lambda _, group: work(ProcessGroupCommunicator(group)), world_size)


# -- state of parameters that no rank has elements of ---------------------------------------------


def some_parameters() -> list[nn.Parameter]:
    """Elements and none, alternating."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((0,), (70, 3), (4, 0), (5,), (0, 2))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            if number < 4:  # the last one never has a gradient
                parameter.grad = gradient
        optimizer.step()


def assert_same_state(got: State, expected: State) -> None:
    assert list(got) == list(expected)
    for key, state in expected.items():
        assert list(got[key]) == list(state)
        for name, value in state.items():
            assert torch.equal(got[key][name], value), (key, name)
            assert got[key][name].dtype == value.dtype


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_state_without_pieces_is_there(kind: type[Optimizer], world_size: int) -> None:
    """Adagrad makes state when it is made."""
    whole_parameters = some_parameters()
    whole = kind(whole_parameters, lr=0.05)
    train(whole_parameters, whole, range(3))
    expected = copy.deepcopy(whole.state_dict()["state"])
    assert set(expected) == ({0, 1, 2, 3} | ({4} if kind is torch.optim.Adagrad else set()))
    train(whole_parameters, whole, range(3, 5))

    def work(comm: Communicator) -> None:
        parameters = some_parameters()
        optimizer = ShardedOptimizer(parameters, kind, comm=comm, lr=0.05)
        train(parameters, optimizer, range(3))
        saved = optimizer.state_dict()
        assert not optimizer.state
        assert_same_state(saved["state"], expected)
        fresh = ShardedOptimizer(parameters, kind, comm=comm, lr=0.05)
        fresh.load_state_dict(saved)
        train(parameters, fresh, range(3, 5))
        assert_same_state(fresh.state_dict()["state"], whole.state_dict()["state"])

    on_ranks(world_size, work)


# -- 16-bit parameters and threads ---------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def step_once(
    comm: Communicator, numel: int = MORE_THAN_A_GRAIN, dtype: torch.dtype = torch.bfloat16
) -> None:
    parameter = nn.Parameter(torch.ones(numel, dtype=dtype))
    optimizer = ShardedOptimizer([parameter], torch.optim.SGD, comm=comm, lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_threads_that_cut_16_bit_parameters_are_named_once(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    with caplog.at_level(logging.WARNING, logger="gradsync"):
        on_ranks(2, lambda comm: step_once(comm, dtype=dtype))
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{dtype} parameter of shape (70003,)" in message
    assert "with 2 intra-op threads" in message
    assert "gs.init(threads=1)" in message
    assert "torch.set_num_threads(1)" in message


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("world_size", "numel", "dtype", "threads"),
    [
        (1, MORE_THAN_A_GRAIN, torch.bfloat16, 2),
        (2, 32_768, torch.bfloat16, 2),
        (2, MORE_THAN_A_GRAIN, torch.float32, 2),
        (2, MORE_THAN_A_GRAIN, torch.bfloat16, 1),
    ],
    ids=["not cut", "one thread takes all of it", "fp32", "one thread"],
)
def test_nothing_is_said_where_bits_are_equal(
    caplog: pytest.LogCaptureFixture,
    world_size: int,
    numel: int,
    dtype: torch.dtype,
    threads: int,
) -> None:
    """The bits are compared here, since the warning rests on them."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).to(dtype)
    gradient = torch.randn(numel, generator=generator).to(dtype)
    whole = nn.Parameter(start.clone())
    whole.grad = gradient.clone()
    torch.optim.SGD([whole], lr=0.1, momentum=0.9, weight_decay=0.1).step()

    def work(comm: Communicator) -> None:
        own = nn.Parameter(start.clone())
        own.grad = gradient.clone()
        ShardedOptimizer(
            [own], torch.optim.SGD, comm=comm, lr=0.1, momentum=0.9, weight_decay=0.1
        ).step()
        assert torch.equal(own, whole)

    with caplog.at_level(logging.WARNING, logger="gradsync"):
        on_ranks(world_size, work)
    assert not caplog.records


# -- optimizers over a part of the model ---------------------------------------------------------


def train_in_parts(
    comm: Communicator, recipe: Recipe, choose: Callable[[int], int]
) -> tuple[list[Tensor], list[State]]:
    """Two optimizers, each over one layer; step k is done by number `choose(k)`."""
    with _RANDOM:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    sync = GradientSync(model, comm, build_engine(model, comm, recipe))
    parts = [torch.optim.AdamW(model[place].parameters(), lr=0.05) for place in (0, 2)]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        leaves = torch.randn(2, 3, 6, generator=generator)
        mine = [comm.rank] if comm.world_size == 2 else [0, 1]
        for index in mine:
            with sync.micro_step(last=index == mine[-1], index=index):
                sync.backward(sync.forward(leaves[index]).square().sum(), weight=3, reduction="sum")
        others = parts[1 - choose(step)].param_groups[0]["params"]
        stayed = [parameter.detach().clone() for parameter in others]
        sync.step(parts[choose(step)], clip_norm=0.5)
        assert all(map(torch.equal, others, stayed))
        assert all(parameter.grad is None for parameter in model.parameters())
    states: list[State] = []
    for optimizer in parts:
        sync.replica.gather(optimizer)
        states.append({number: optimizer.state[p] for number, p in enumerate(optimizer.state)})
    sync.close()
    return [parameter.detach().clone() for parameter in model.parameters()], states


@pytest.mark.parametrize("recipe", [ZERO1, ZERO2], ids=["zero1", "zero2"])
@pytest.mark.parametrize("choose", [lambda _: 0, lambda step: step % 2], ids=["one", "in turn"])
def test_an_optimizer_may_hold_a_part_of_the_model(
    recipe: Recipe, choose: Callable[[int], int]
) -> None:
    """Parameters that it does not hold stay, and their gradients are gone after the step."""
    (expected,) = on_ranks(1, lambda comm: train_in_parts(comm, INVARIANT, choose))
    for world_size in (1, 2):
        for weights, states in on_ranks(world_size, lambda c: train_in_parts(c, recipe, choose)):
            for got, tensor in zip(weights, expected[0], strict=True):
                if recipe is ZERO1:
                    assert torch.equal(got, tensor)
                torch.testing.assert_close(got, tensor, rtol=1e-5, atol=1e-6)
            if recipe is ZERO1:
                for state, whole in zip(states, expected[1], strict=True):
                    assert_same_state(state, whole)
