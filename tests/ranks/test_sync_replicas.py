"""The replica check finds what differs, names it, and says the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import RunError
from gradsync.sync import check_replicas as module
from gradsync.sync.check_replicas import check_replicas, hash_bits, replica_tensors
from support.thread_ranks import run_thread_ranks

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64),
    *(torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)


@given(
    dtype=st.sampled_from(DTYPES),
    content=st.binary(min_size=16, max_size=400),
    place=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype, content: bytes, place: int) -> None:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    data = torch.tensor(list(content[: len(content) // itemsize * itemsize]), dtype=torch.uint8)
    before = hash_bits(data.view(dtype)).tolist()
    data[place % len(data)] ^= 1 << (place // len(data) % 8)
    assert hash_bits(data.view(dtype)).tolist() != before


@given(
    dtype=st.sampled_from([d for d in DTYPES if d.itemsize <= 4]),
    content=st.binary(min_size=8, max_size=400),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_swapped_elements_change_the_hash(
    dtype: torch.dtype, content: bytes, data: st.DataObject
) -> None:
    itemsize = dtype.itemsize
    count = len(content) // itemsize
    elements = torch.tensor(list(content[: count * itemsize]), dtype=torch.uint8)
    rows = elements.view(count, itemsize)
    first = data.draw(st.integers(0, count - 1))
    second = data.draw(st.integers(0, count - 1))
    order = list(range(count))
    order[first], order[second] = second, first
    swapped = rows[order].contiguous()
    same = torch.equal(swapped, rows)
    equal = torch.equal(hash_bits(swapped.view(-1).view(dtype)), hash_bits(elements.view(dtype)))
    assert equal == same


def test_pieces_add_up_to_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    numbers = torch.randint(-(2**31), 2**31 - 1, (29,), dtype=torch.int32)
    plain = sum(numbers.tolist())
    weighted = sum((i + 1) * x for i, x in enumerate(numbers.tolist()))
    assert hash_bits(numbers).tolist() == [plain, weighted]
    assert hash_bits(numbers[:0]).tolist() == [0, 0]
    column = torch.randn(6, 5).t()
    assert torch.equal(hash_bits(column), hash_bits(column.contiguous()))


def verdicts(change: Callable[[int, nn.Module], None], world_size: int) -> list[str]:
    """The error on every rank after rank-dependent `change`s to equal models."""
    start = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).state_dict()

    def work(rank: int, group: object) -> str:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        model.load_state_dict(start)
        comm = ProcessGroupCommunicator(group)
        check_replicas(model.named_parameters(), comm, step=1)
        change(rank, model)
        try:
            check_replicas(model.named_parameters(), comm, step=12)
        except RunError as error:
            return str(error)
        return ""

    return run_thread_ranks(work, world_size)


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.detach().view(-1).view(torch.int32)[1] ^= 1 << bit


@pytest.mark.parametrize(
    ("world_size", "flips", "said"),
    [
        (
            4,
            {2: ((1, "weight"), (1, "bias"))},
            "first in '1.weight' (2 of 4 tensors): rank 2 holds other bits than ranks 0,1,3; go",
        ),
        (3, {1: ((0, "weight"),)}, "rank 1 holds other bits than ranks 0,2;"),
        (
            2,
            {1: ((0, "bias"),)},
            "first in '0.bias' (1 of 4 tensors): rank 0 / rank 1 hold different bits, and without "
            "a majority it cannot be said which is right",
        ),
        (4, {0: ((0, "weight"),), 3: ((0, "weight"),)}, "rank 0 / ranks 1,2 / rank 3 hold diff"),
    ],
)
def test_the_minority_is_named_on_all_ranks(
    world_size: int, flips: dict[int, tuple[tuple[int, str], ...]], said: str
) -> None:
    """Two of four are no majority."""

    def change(rank: int, model: nn.Module) -> None:
        for layer, name in flips.get(rank, ()):
            flip(model.get_submodule(str(layer)).get_parameter(name), rank)

    told = verdicts(change, world_size)
    assert told == [told[0]] * world_size
    assert told[0].startswith("replicas differ after step 12, first in ")
    assert said in told[0]
    assert told[0].endswith("; go back to a checkpoint from before")


@pytest.mark.parametrize(
    ("one", "other"), [(0x0, -0x80000000), (0x7FC00000, 0x7FC00001)], ids=["zeros", "nans"]
)
def test_bits_are_compared_not_numbers(one: int, other: int) -> None:
    """0.0 and -0.0 differ, and so do two NaNs with other payloads; one NaN everywhere is equal."""

    def put(*numbers: int) -> list[str]:
        def change(rank: int, model: nn.Module) -> None:
            model[0].bias.detach().view(torch.int32)[0] = numbers[rank]

        return verdicts(change, 2)

    assert "'0.bias'" in put(one, other)[0]
    assert put(other, other) == ["", ""]


def test_unequal_lists_are_told_apart_and_do_not_hang() -> None:
    def work(rank: int, group: object) -> str:
        tensors = [("a", torch.ones(2)), ("b", torch.ones(3))][: 2 - rank]
        with pytest.raises(RunError) as caught:
            check_replicas(tensors, ProcessGroupCommunicator(group))
        return str(caught.value)

    told = run_thread_ranks(work, 2)
    assert "replicas differ, first in 'b'" in told[0]
    assert told[0] == told[1]

    def other_order(rank: int, group: object) -> str:
        tensors = [("a", torch.ones(2)), ("b", torch.ones(2))]
        with pytest.raises(RunError) as caught:
            check_replicas(tensors[:: 1 - 2 * rank], ProcessGroupCommunicator(group))
        return str(caught.value)

    assert "in another order" in run_thread_ranks(other_order, 2)[1]


def test_optimizer_state_and_buffers_are_replicas_too() -> None:
    def work(rank: int, group: object) -> str:
        model = nn.BatchNorm1d(3)
        with torch.no_grad():
            model(torch.arange(6.0).reshape(2, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(6.0).reshape(2, 3)).sum().backward()
        optimizer.step()
        names = [name for name, _ in replica_tensors(model, [optimizer])]
        assert names == [
            *("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
            *("exp_avg of weight", "exp_avg_sq of weight", "step of weight"),
            *("exp_avg of bias", "exp_avg_sq of bias", "step of bias"),
        ]
        comm = ProcessGroupCommunicator(group)
        check_replicas(replica_tensors(model, [optimizer]), comm)
        if rank == 1:
            optimizer.state[model.bias]["exp_avg_sq"][0] += 1
        with pytest.raises(RunError) as caught:
            check_replicas(replica_tensors(model, [optimizer]), comm)
        return str(caught.value)

    assert "first in 'exp_avg_sq of bias' (1 of 11 tensors)" in run_thread_ranks(work, 2)[0]
