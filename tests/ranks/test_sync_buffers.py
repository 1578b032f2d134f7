"""Buffers that forwards change: one rule, the same bits on any number of ranks."""

from __future__ import annotations

import copy
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.values import all_sum
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.buffers import BufferSync, exact_sum
from gradsync.sync.replicate import replicate
from support.engine_cases import global_random_state
from support.thread_ranks import run_thread_ranks

NUM_LEAVES = (7, 5, 3)  # of each step; at four ranks the last one leaves a rank without


class Habits(nn.Module):
    """Buffers of the sorts that models keep: averages, counters, flags, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("wave", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("rough", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("large", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x_BC: Tensor) -> Tensor:
        mean = x_BC.detach().mean(0)
        self.center = 0.9 * self.center + 0.1 * mean  # assigned anew, as many do
        self.wave.add_(torch.complex(mean, -mean))
        self.rough.mul_(0.5).add_(mean)
        self.seen[len(x_BC) % 3] += 2
        self.large |= bool(x_BC.abs().max() > 1.5)
        return x_BC + self.table


def build() -> nn.Module:
    with global_random_state:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
            nn.BatchNorm1d(4),
            Habits(),
            nn.BatchNorm1d(4, momentum=None),
            nn.Unflatten(1, (2, 2)),
            nn.InstanceNorm1d(2, track_running_stats=True),
        )


def inputs_of(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return (1 + index) * torch.randn(3 + index % 3, 6, generator=generator) + index


def end_step(sync: BufferSync, comm: Communicator | None = None) -> None:
    """The calls that a handle makes at the end of a step."""
    counts = sync.step_begins()
    sync.step_ends(all_sum(comm or SingleCommunicator(), *counts) if counts else [], ())


def train(comm: Communicator, model: nn.Module, forward: Any = None) -> dict[str, Tensor]:
    """Steps in which only buffers move; returns them."""
    sync = BufferSync(model, comm)
    for step, num_leaves in enumerate(NUM_LEAVES):
        for index in share(num_leaves, comm.rank, comm.world_size):
            (forward or model)(inputs_of(step, index)).square().sum().backward()
            sync.leaf_ends(counts=index != 1)
        end_step(sync, comm)
    sync.close()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_same_bits_on_any_number_of_ranks(world_size: int) -> None:
    alone = train(SingleCommunicator(), build())
    for result in run_thread_ranks(
        lambda _, group: train(ProcessGroupCommunicator(group), build()), world_size
    ):
        assert_same_bits(result, alone)


def test_the_rule_is_the_documented_one() -> None:
    """Against the definition, leaf by leaf on copies, in float64."""
    oracle = build()
    for step, num_leaves in enumerate(NUM_LEAVES):
        start = {name: buffer.clone() for name, buffer in oracle.named_buffers()}
        after = []
        for index in range(num_leaves):
            leaf = copy.deepcopy(oracle)
            leaf(inputs_of(step, index)).sum().backward()
            if index != 1:  # weight 0
                after.append(dict(leaf.named_buffers()))
        for name, buffer in oracle.named_buffers():
            values = torch.stack([buffers[name] for buffers in after])
            if buffer.is_floating_point() or buffer.is_complex():
                wide = torch.complex128 if buffer.is_complex() else torch.float64
                change = (values.to(wide) - start[name].to(wide)).mean(0)
                buffer.copy_(start[name].to(wide) + change)
            else:
                change = (values.long() - start[name].long()).amax(0)
                buffer.copy_(start[name].long() + change)
    expected = dict(oracle.named_buffers())
    result = train(SingleCommunicator(), build())
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    assert result["1.num_batches_tracked"] == len(NUM_LEAVES)  # steps, not forwards
    assert result["2.seen"].tolist() == [6, 4, 6]  # + 2 in every step that had such a leaf
    assert result["2.large"].item()


def test_compiled_models_follow_the_same_rule() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        result = train(SingleCommunicator(), model, compiled)
    finally:
        torch.compiler.reset()
    for name, tensor in train(SingleCommunicator(), twin).items():
        torch.testing.assert_close(result[name], tensor, msg=name)


def test_several_forwards_may_wait_for_one_backward() -> None:
    """Setting back must not trip autograd over what batch_norm saved."""
    model = nn.BatchNorm1d(3)
    sync = BufferSync(model, SingleCommunicator())
    one, two = model(torch.randn(4, 3)), model(torch.randn(4, 3))
    one.square().sum().backward()
    sync.leaf_ends()
    two.square().sum().backward()
    sync.leaf_ends()
    end_step(sync)
    assert model.num_batches_tracked == 2  # both forwards came before the first leaf's end


def test_what_is_not_a_leaf_leaves_no_trace() -> None:
    model = nn.BatchNorm1d(3)
    sync = BufferSync(model, SingleCommunicator())
    start = copy.deepcopy(model.state_dict())
    model(torch.randn(4, 3))  # no backward
    end_step(sync)
    assert_same_bits(model.state_dict(), start)
    model.eval()(torch.randn(4, 3)).sum().backward()
    sync.leaf_ends()
    end_step(sync)
    model.train()(torch.randn(4, 3)).sum().backward()
    sync.leaf_ends(counts=False)
    end_step(sync)
    assert_same_bits(model.state_dict(), start)
    with sync.untouched():
        model(torch.randn(4, 3))
        assert model.num_batches_tracked == 1
    assert_same_bits(model.state_dict(), start)


@pytest.mark.parametrize("loads", [False, True])
def test_a_step_that_is_refused_leaves_no_trace(loads: bool) -> None:
    """`step_ends` does not come then; the next step begins as if that one had not been."""
    model, expected = build(), build()
    sync, plain = (
        BufferSync(model, SingleCommunicator()),
        BufferSync(expected, SingleCommunicator()),
    )
    before = copy.deepcopy(model.state_dict())
    for index in range(2):
        model(inputs_of(0, index)).sum().backward()
        sync.leaf_ends()
    model(inputs_of(0, 2))  # without a backward
    sync.step_begins()
    assert_same_bits(dict(model.named_buffers()), dict(expected.named_buffers()))
    if loads:
        model.load_state_dict(before)
    for net, its in ((model, sync), (expected, plain)):
        net(inputs_of(1, 0)).sum().backward()
        its.leaf_ends()
        end_step(its)
    assert_same_bits(dict(model.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("sync", ["invariant", "naive"])
def test_a_step_that_a_rank_discards_leaves_no_trace(sync: str) -> None:
    """Not even the nan that made it discard."""

    def work(rank: int, group: Any) -> list[Tensor]:
        model = build()
        handle = replicate(
            model, comm=ProcessGroupCommunicator(group), strategy=sync, batch_norm="local"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [buffer.clone() for buffer in model.buffers()]
        inputs = inputs_of(0, rank)
        handle.backward(
            model(inputs if rank else inputs * math.nan).sum(), weight=4, reduction="sum"
        )
        if rank == 0:
            handle.discard()
        else:
            assert handle.step(optimizer).discarded
        assert all(map(torch.equal, before, model.buffers()))
        handle.backward(model(inputs).sum(), weight=4, reduction="sum")
        handle.step(optimizer)
        found = [buffer.clone() for buffer in model.buffers()]
        handle.close()
        return found

    first, second = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))
    assert all(buffer.isfinite().all() for buffer in first)


@pytest.mark.parametrize("how", ["by hand", "loaded", "loaded, submodules called"])
def test_changes_between_steps_are_the_new_start(how: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    sync = BufferSync(model, SingleCommunicator())
    layer: Any = model[0]
    for value in (5.0, 7.0):
        if how == "by hand":
            layer.running_mean.fill_(value)
        else:
            model.load_state_dict(model.state_dict() | {"0.running_mean": torch.full((3,), value)})
        for _ in range(2):
            x = torch.zeros(4, 3)
            outputs = model(x) if how != "loaded, submodules called" else model[1](layer(x))
            outputs.sum().backward()
            sync.leaf_ends()
        end_step(sync)
        torch.testing.assert_close(layer.running_mean, torch.full((3,), 0.9 * value))
    layer.running_mean.fill_(1.0)
    end_step(sync)  # of a step in which nothing ran here
    assert layer.running_mean.tolist() == [1.0] * 3


def test_copies_of_the_model_live_for_themselves() -> None:
    model = nn.BatchNorm1d(3)
    sync = BufferSync(model, SingleCommunicator())
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 3))
    model.running_mean.fill_(9.0)  # by hand, and no forward of this model since
    end_step(sync)
    assert model.running_mean.tolist() == [9.0] * 3
    model(torch.randn(4, 3)).sum().backward()
    sync.leaf_ends()
    twin(torch.randn(4, 3)).sum().backward()
    end_step(sync)
    assert (model.num_batches_tracked, twin.num_batches_tracked) == (1, 2)
    del sync
    model(torch.randn(4, 3))  # the hook finds no handle
    assert model.num_batches_tracked == 2


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    model = Habits()
    sync = BufferSync(model, SingleCommunicator())
    model.center = torch.zeros(5)
    with pytest.raises(ConfigError, match=r"buffer 'center' became \[5\] .* \(\[4\] "):
        sync.leaf_ends()
    model.center = None
    with pytest.raises(ConfigError, match="buffer 'center' was removed"):
        sync.leaf_ends()


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_sums_have_no_order(numbers: list[float], rng: random.Random) -> None:
    jumps = torch.arange(len(numbers)).reshape(-1, 1)

    def total(values: list[float]) -> float:
        column = torch.tensor(values, dtype=torch.float64).reshape(-1, 1)
        result, largest = exact_sum(column, jumps, SingleCommunicator(), most=len(values))
        assert largest.tolist() == [len(numbers) - 1]
        return float(result)

    shuffled = numbers.copy()
    rng.shuffle(shuffled)
    assert total(shuffled) == total(numbers)
    exact = sum(Fraction(number) for number in numbers)
    largest = Fraction(max(abs(number) for number in numbers))
    # Each becomes an integer of 62 - ceil(log2 n) > 61 - log2 n bits, half a unit off at most; then
    # their sum becomes a float64.
    rounded = len(numbers) ** 2 * largest / 2**61 + abs(exact) / 2**52
    assert abs(Fraction(total(numbers)) - exact) <= rounded + Fraction(1, 2**900)


def test_extreme_values_in_sums() -> None:
    values = torch.tensor(
        [[1e308, 5e-324, math.inf, math.nan, 0.0], [-1e308, 0.0, 1.0, 1.0, 0.0]],
        dtype=torch.float64,
    )
    total, _ = exact_sum(values, torch.zeros(2, 0).long(), SingleCommunicator(), most=2)
    assert total[[0, 1, 4]].tolist() == [0.0, 0.0, 0.0]
    assert total[[2, 3]].isnan().all()
