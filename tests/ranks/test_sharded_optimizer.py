"""The sharded optimizer has the bits of the whole one, at any number of ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.ownership import sharded_optimizer
from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer
from support.engine_cases import bits
from support.thread_ranks import run_thread_ranks

MORE_THAN_A_GRAIN = 70_003
SHAPES = ((70, 33), (5,), (), (129,), (64, 3), (1,), (7, 7, 7), (2, 1000))
NUM_STEPS = 4

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True, "amsgrad": True}),
    "adam foreach": (torch.optim.Adam, {"lr": 0.05, "foreach": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
}


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Parameter 3 has none in step 1, parameter 4 never has one."""
    generator = torch.Generator().manual_seed(1 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        skipped = number == 4 or (number == 3 and step == 1)
        parameter.grad = None if skipped else gradient


def train(parameters: list[nn.Parameter], optimizer: Optimizer, first: int = 0) -> list[Tensor]:
    for step in range(first, first + NUM_STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in parameters]


def assert_same(got: Any, expected: Any) -> None:
    """Equal to the bit, all the way down."""
    assert bits(got) == bits(expected)


def on_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """`work(comm)` on every rank."""
    return run_thread_ranks(lambda _, group: work(ProcessGroupCommunicator(group)), world_size)


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_optimizer, "BUCKET_BYTES", 2000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_and_state_have_the_bits_of_the_whole_optimizer(world_size: int) -> None:
    expected = {}
    for name, (kind, options) in OPTIMIZERS.items():
        whole_parameters = make_parameters()
        whole = kind(whole_parameters, **options)
        expected[name] = (train(whole_parameters, whole), whole.state_dict())

    def work(comm: Communicator) -> None:
        for name, (kind, options) in OPTIMIZERS.items():
            parameters = make_parameters()
            optimizer = ShardedOptimizer(parameters, kind, comm=comm, **options)
            assert_same(train(parameters, optimizer), expected[name][0])
            assert_same(optimizer.state_dict(), expected[name][1])
            assert not optimizer.state

    on_ranks(world_size, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    whole = make_parameters(dtype)
    expected = train(whole, torch.optim.AdamW(whole, lr=0.05))

    def work(comm: Communicator) -> list[Tensor]:
        parameters = make_parameters(dtype)
        return train(
            parameters, ShardedOptimizer(parameters, torch.optim.AdamW, comm=comm, lr=0.05)
        )

    for got in on_ranks(3, work):
        assert_same(got, expected)


def grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "weight_decay": 0.3},
        {"params": iter(parameters[3:]), "lr": 0.02, "betas": (0.5, 0.9)},
    ]


def scheduled(parameters: list[nn.Parameter], optimizer: Optimizer) -> list[Tensor]:
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=8)
    for step in range(NUM_STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        cycle.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("world_size", [1, 3])
def test_groups_and_schedulers(world_size: int) -> None:
    """Learning rate and momentum of each group change between steps."""
    whole = make_parameters()
    expected = scheduled(whole, torch.optim.AdamW(grouped(whole), lr=0.05))
    assert not torch.equal(expected[0], train(make_parameters(), torch.optim.SGD(whole))[0])

    def work(comm: Communicator) -> list[Tensor]:
        parameters = make_parameters()
        optimizer = ShardedOptimizer(grouped(parameters), torch.optim.AdamW, comm=comm, lr=0.05)
        return scheduled(parameters, optimizer)

    for got in on_ranks(world_size, work):
        assert_same(got, expected)


def test_names_frozen_parameters_and_added_groups() -> None:
    def parts(make: Callable[..., Optimizer]) -> tuple[list[Tensor], dict[str, Any]]:
        parameters = make_parameters()
        parameters[1].requires_grad_(False)
        optimizer = make(parameters[:5])
        optimizer.add_param_group({"params": parameters[5:], "lr": 0.3})
        for step in range(NUM_STEPS):
            set_gradients(parameters, step)
            parameters[1].grad = None
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters], optimizer.state_dict()

    expected, state = parts(lambda first: torch.optim.AdamW(first, lr=0.05))

    def work(comm: Communicator) -> None:
        kind = torch.optim.AdamW
        sharded = parts(lambda first: ShardedOptimizer(first, kind, comm=comm, lr=0.05))
        assert_same(list(sharded), [expected, state])

    on_ranks(2, work)
    model = nn.Linear(3, 2)
    by_name = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    assert by_name.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd momentum", "adagrad", "nadam"])
def test_state_moves_between_numbers_of_ranks(name: str) -> None:
    """1 -> 3 -> 2 -> plain, as one undisturbed run of the plain optimizer."""
    kind, options = OPTIMIZERS[name]
    parameters = make_parameters()
    plain = kind(parameters, **options)
    expected = [train(parameters, plain, first=first) for first in (0, 4, 8, 12)]

    def part(comm: Communicator, weights: list[Tensor], state: Any, first: int) -> Any:
        own = [nn.Parameter(tensor.clone()) for tensor in weights]
        optimizer = ShardedOptimizer(own, kind, comm=comm, **options)
        if state is not None:
            optimizer.load_state_dict(state)
        assert not optimizer.state
        return train(own, optimizer, first=first), optimizer.state_dict()

    weights: list[Tensor] = [p.detach() for p in make_parameters()]
    state: Any = None
    for number, world_size in enumerate((1, 3, 2)):
        results = on_ranks(world_size, lambda c: part(c, weights, state, 4 * number))  # noqa: B023
        weights, state = results[0]
        for got, _ in results:
            assert_same(got, expected[number])
    last = [nn.Parameter(tensor) for tensor in weights]
    again = kind(last, **options)
    again.load_state_dict(state)
    assert_same(train(last, again, first=12), expected[3])


def test_memory_is_divided() -> None:
    parameters = make_parameters()
    total = sum(p.numel() for n, p in enumerate(parameters) if n != 4) * 2 * 4

    def work(comm: Communicator) -> int:
        own = make_parameters()
        optimizer = ShardedOptimizer(own, torch.optim.AdamW, comm=comm)
        train(own, optimizer)
        return optimizer.state_bytes

    assert on_ranks(1, work) == [total]
    for world_size in (2, 4):
        shares = on_ranks(world_size, work)
        assert sum(shares) == total  # no rank keeps what another has
        # Padding, and the parameter without state, come on top of equal parts.
        assert max(shares) <= total / world_size + (64 * len(SHAPES) + 192) * 8


def test_only_the_own_part_of_the_gradient_is_read() -> None:
    """After a reduce-scatter the rest of `.grad` is this rank's own; it must not matter."""
    whole = make_parameters()
    expected = train(whole, torch.optim.AdamW(whole, lr=0.05))

    def work(comm: Communicator) -> list[Tensor]:
        parameters = make_parameters()
        optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, comm=comm, lr=0.05)
        for step in range(NUM_STEPS):
            set_gradients(parameters, step)
            given = [p.grad for p in parameters]
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = torch.full_like(parameter, float("nan"))
            for bucket in optimizer._update.buckets:
                for piece in bucket.pieces:
                    whole, here = given[piece.index], slice(piece.start, piece.stop)
                    if whole is not None:
                        parameters[piece.index].grad.view(-1)[here] = whole.view(-1)[here]
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    for got in on_ranks(4, work):
        assert_same(got, expected)


def test_a_parameter_whose_data_was_replaced_is_still_updated() -> None:
    def twice(make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> list[Tensor]:
        parameters = make_parameters()
        optimizer = make_optimizer(parameters)
        train(parameters, optimizer)
        for parameter in parameters:
            parameter.data = parameter.data * 0.5
        return train(parameters, optimizer, first=NUM_STEPS)

    expected = twice(lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
    single = SingleCommunicator()
    got = twice(lambda p: ShardedOptimizer(p, torch.optim.AdamW, comm=single, lr=0.05))
    assert_same(got, expected)


def test_loading_replaces_what_was_there() -> None:
    parameters = make_parameters()
    fresh = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.05).state_dict()
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    train(parameters, optimizer)
    assert optimizer.state_bytes
    optimizer.load_state_dict(fresh)
    assert_same(optimizer.state_dict(), fresh)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_closures_and_hooks() -> None:
    (parameter, *_) = make_parameters()
    optimizer = ShardedOptimizer([parameter], torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    loss = optimizer.step(closure)
    assert torch.equal(loss.detach(), before.square().sum())
    assert torch.equal(parameter.detach(), before - 0.1 * (2 * before))
    assert seen == [1]


def test_a_few_buckets_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one, or nothing overlaps; not all, or their buffers would be another copy."""
    log: list[str] = []

    class Slow(SingleCommunicator):
        def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
            super().all_gather(output, tensor)
            log.append("launch")
            return mock.Mock(wait=lambda: log.append("wait"))

    parameters = make_parameters()
    monkeypatch.setattr(sharded_optimizer, "BUCKET_BYTES", 0)
    train(parameters, ShardedOptimizer(parameters, torch.optim.SGD, comm=Slow()))
    under_way = list(accumulate(1 if event == "launch" else -1 for event in log))
    assert log.count("launch") == NUM_STEPS * len(SHAPES)
    assert under_way[-1] == 0
    assert max(under_way) == 3


def test_ranks_with_different_parameters_are_told() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as error:
            ShardedOptimizer(make_parameters()[: 5 + comm.rank], torch.optim.SGD, comm=comm, lr=0.1)
        return str(error.value)

    messages = on_ranks(2, work)
    assert "the ranks shard different parameters" in messages[0]
    assert messages[0].endswith("this rank has 5")
    assert messages[1].endswith("this rank has 6")


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_state_without_pieces_is_there(kind: type[Optimizer], world_size: int) -> None:
    """Of parameters that no rank has elements of; the last one never has a gradient."""

    def some_parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(shape)) for shape in ((0,), (70, 3), (4, 0), (5,), (0, 2))]

    def two_steps(parameters: list[nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
        for step in range(2):
            for parameter in parameters[:4]:
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            optimizer.step()
        return optimizer.state_dict()

    parameters = some_parameters()
    whole = kind(parameters, lr=0.05)
    expected = [copy.deepcopy(two_steps(parameters, whole)) for _ in range(2)]
    assert (4 in expected[0]["state"]) == (kind is torch.optim.Adagrad)  # made with the optimizer

    def work(comm: Communicator) -> None:
        parameters = some_parameters()
        optimizer = ShardedOptimizer(parameters, kind, comm=comm, lr=0.05)
        assert_same(two_steps(parameters, optimizer), expected[0])
        fresh = ShardedOptimizer(parameters, kind, comm=comm, lr=0.05)
        fresh.load_state_dict(optimizer.state_dict())
        assert_same(two_steps(parameters, fresh), expected[1])

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
    caplog: pytest.LogCaptureFixture, world_size: int, numel: int, dtype: torch.dtype, threads: int
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
