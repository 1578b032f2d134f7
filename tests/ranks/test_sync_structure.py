"""Ranks that start with different models are told so; equal ones start with rank 0's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.values import all_gather_json, all_gather_numbers, same_on_all_ranks
from gradsync.errors import ConfigError
from gradsync.sync.check_replicas import broadcast_model, check_same_model
from support.thread_ranks import run_thread_ranks


def complaints(
    build: Callable[[int], nn.Module],
    world_size: int = 3,
    settings: Callable[[int], dict[str, str | None] | None] = lambda rank: None,
) -> list[str]:
    """The error on every rank; "" where nothing is wrong."""

    def work(rank: int, group: object) -> str:
        try:
            check_same_model(build(rank), ProcessGroupCommunicator(group), settings(rank))
        except ConfigError as error:
            return str(error)
        return ""

    return run_thread_ranks(work, world_size)


def test_equal_models_pass_with_other_values() -> None:
    assert complaints(lambda rank: nn.Linear(3, 2), settings=lambda rank: {"sync": "a"}) == [""] * 3


def in_order(rank: int) -> nn.Module:
    names = "ba" if rank == 2 else "ab"
    return nn.ParameterDict([(name, nn.Parameter(torch.zeros(2))) for name in names])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda rank: nn.Linear(2, 2, bias=rank != 2), "'bias' differs: ranks 0,1 [2]"),
        (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), "frozen on cpu"),
        (lambda rank: nn.BatchNorm1d(2, track_running_stats=rank > 0), "buffer 'running_mean'"),
        (
            lambda rank: nn.Linear(2, 2).to([torch.float32, torch.half][rank % 2]),
            "rank 1 [2, 2] torch.flo",
        ),
        (
            lambda rank: nn.Sequential(*[nn.Linear(2, 2)] * (rank + 1)),
            "'1.weight' differs: rank 0 noth",
        ),
        (lambda rank: nn.Linear(2, 2) if rank else nn.LazyLinear(2), "of unknown shape"),
        (in_order, "number 1 of the list differs: ranks 0,1 parameter 'a', rank 2 parameter 'b'"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_whatever_differs_all_ranks_say_the_same(
    build: Callable[[int], nn.Module], expected: str
) -> None:
    told = complaints(build)
    assert expected in told[0]
    assert told == [told[0]] * 3
    if "has no values" not in expected:
        assert told[0].startswith("ranks do not start alike: ")
        assert told[0].endswith("; run the same script with the same arguments on every rank")


def test_settings_are_compared_too() -> None:
    told = complaints(lambda rank: nn.Linear(2, 2), settings=lambda r: {"sync": f"way {r % 2}"})
    assert "sync differs: ranks 0,2 'way 0', rank 1 'way 1'" in told[2]
    told = complaints(lambda _: nn.Linear(2, 2), settings=lambda r: {"x": None if r else "None"})
    assert "x differs: rank 0 'None', ranks 1,2 None" in told[0]


def zoo(rank: int) -> nn.Module:
    """Tensors of all sorts, with other values on every rank."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Module()
    numbers = torch.randn(4, 6, generator=generator)
    model.plain = nn.Parameter(numbers.clone())
    model.tied = model.plain
    model.frozen = nn.Parameter(numbers.half(), requires_grad=False)
    model.transposed = nn.Parameter(numbers.t())
    model.last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.register_buffer("brain", numbers.bfloat16())
    model.register_buffer("wave", torch.complex(numbers, numbers))
    model.register_buffer("count", torch.tensor(rank + 7))
    model.register_buffer("mask", numbers > 0)
    model.register_buffer("strided", numbers[:, ::2])
    model.register_buffer("expanded", torch.arange(6).add(rank).expand(3, 6))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("hidden", numbers.double(), persistent=False)
    payload = torch.tensor([0x7FC00001 + rank, rank], dtype=torch.int32)
    model.register_buffer("nan", payload.view(torch.float32))
    return model


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_all_start_with_the_bits_of_rank_0() -> None:
    def work(rank: int, group: object) -> dict[str, tuple[object, ...]]:
        model, comm = zoo(rank), ProcessGroupCommunicator(group)
        check_same_model(model, comm)
        before = {name: t.stride() for name, t in [*model.named_parameters()]}
        broadcast_model(model, comm)
        assert model.tied is model.plain
        assert {name: t.stride() for name, t in [*model.named_parameters()]} == before
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: (tensor.dtype, tuple(tensor.shape), bits(tensor)) for name, tensor in tensors}

    results = run_thread_ranks(work, 3)
    own = zoo(0)
    assert len(results[0]) == 13
    for name, tensor in [*own.named_parameters(), *own.named_buffers()]:
        if name != "last":  # made without the generator
            assert results[2][name] == (tensor.dtype, tuple(tensor.shape), bits(tensor)), name
    assert results == [results[0]] * 3


def test_ranks_with_other_strides_still_exchange_the_same_elements() -> None:
    def work(rank: int, group: object) -> list[list[float]]:
        model = nn.Linear(3, 2, bias=False)
        values = torch.arange(6.0).reshape(2, 3) + 10 * rank
        model.weight = nn.Parameter(values if rank else values.t().contiguous().t())
        broadcast_model(model, ProcessGroupCommunicator(group))
        return model.weight.tolist()

    assert run_thread_ranks(work, 2) == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2


def test_values_of_all_ranks_are_gathered() -> None:
    def work(rank: int, group: object) -> tuple[list[object], list[int], bool, bool]:
        comm = ProcessGroupCommunicator(group)
        values = all_gather_json(comm, {"rank": rank, "text": "ü" * 5 * rank, "none": None})
        numbers = all_gather_numbers(comm, -(2**63) + rank)
        same = same_on_all_ranks(comm, b"equal")
        return values, numbers, same, same_on_all_ranks(comm, b"x" * (1 + rank // 2))

    for values, numbers, same, other in run_thread_ranks(work, 3):
        assert values == [{"rank": r, "text": "ü" * 5 * r, "none": None} for r in range(3)]
        assert numbers == [-(2**63) + r for r in range(3)]
        assert (same, other) == (True, False)
    assert all_gather_json(SingleCommunicator(), [1]) == [[1]]
