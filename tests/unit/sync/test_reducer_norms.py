"""The clipping norm: right, and the same bits however gradients lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.sync.layout import BLOCK
from gradsync.sync.replicas import (
    Replicas,
    gradient_norm,
    norms_in_rows,
    norms_of_blocks,
    scale_all,
)

SHAPES = [(3,), (70, 9), (BLOCK,), (BLOCK + 1,), (4, 5, 6, 7), (2 * BLOCK + 77,), ()]


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _turned(tensor: Tensor) -> Tensor:
    """Dimensions in reverse order."""
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def bits(norm: Tensor) -> int:
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    return int(norm.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_torch_to_rounding(dtype: torch.dtype) -> None:
    found = gradients(dtype)
    exact = torch.cat([g.double().reshape(-1) for g in found]).norm()
    # Each block's norm is rounded to the gradients' precision, and its sum is one of 65,536 terms
    # in vector lanes: measured 2e-7 in fp32.
    rtol = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(gradient_norm(found).double(), exact, rtol=rtol, atol=0.0)


def test_bf16_gradients_have_an_fp32_norm() -> None:
    """As [Note: Fixed blocks] says; rounded to bf16 the norm would be off by up to 0.4 %.

    fp32's own rounding over a block of 65,536 squares is a few 1e-6.
    """
    found = gradients(torch.bfloat16)
    exact = torch.cat([g.double().reshape(-1) for g in found]).norm()
    torch.testing.assert_close(gradient_norm(found).double(), exact, rtol=1e-5, atol=0.0)


def _odd_places(plain: list[Tensor]) -> list[Tensor]:
    flat = torch.empty(sum(g.numel() + 5 for g in plain) + 1)
    views, start = [], 1
    for g in plain:
        views.append(flat[start : start + g.numel()].view(g.shape).copy_(g))
        start += g.numel() + 5
    return views


def _every_second(plain: list[Tensor]) -> list[Tensor]:
    return [torch.stack([g, -g], dim=-1)[..., 0] for g in plain]


def _other_strides(plain: list[Tensor]) -> list[Tensor]:
    return [_turned(_turned(g).contiguous()) for g in plain]


@pytest.mark.parametrize("place", [_odd_places, _every_second, _other_strides])
def test_bits_do_not_depend_on_memory(place: Callable[[list[Tensor]], list[Tensor]]) -> None:
    plain = gradients()
    moved = place(plain)
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))
    assert place is _odd_places or not moved[1].is_contiguous()
    assert bits(gradient_norm(moved)) == bits(gradient_norm(plain))


def test_a_block_ends_with_its_parameter() -> None:
    """A parameter's part of the norm does not depend on what stands before it."""
    long = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(1))
    pieces = [long[:BLOCK], long[BLOCK:]]
    assert bits(gradient_norm([long])) == bits(gradient_norm(pieces))
    assert bits(gradient_norm([torch.zeros(7), long])) == bits(gradient_norm([long]))


def test_a_long_sum_loses_nothing() -> None:
    """The squares of 20,000 equal gradients: added in fp32 one after the other they would drift."""
    found = [torch.full((1,), 0.1)] * 20_000
    torch.testing.assert_close(
        gradient_norm(found), torch.tensor(0.1 * 20_000**0.5), rtol=1e-7, atol=0.0
    )


def test_large_gradients_do_not_overflow() -> None:
    """Each square fits into fp32, their sum does not."""
    norm = gradient_norm([torch.full((1,), 1e18)] * 1000)
    torch.testing.assert_close(norm, torch.tensor(1e18 * 1000**0.5))


def test_nothing_and_empty() -> None:
    assert bits(gradient_norm([])) == 0
    assert bits(gradient_norm([torch.empty(0), torch.empty(3, 0)])) == 0
    assert bits(clip_gradients([], 1.0)) == 0
    assert float(gradient_norm([torch.empty(0), torch.full((4,), 2.0)])) == 4.0


def clip_gradients(gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return Replicas(nn.ParameterList(parameters), SingleCommunicator()).clip(max_norm)


def test_clips_like_torch() -> None:
    ours, theirs = gradients(), [nn.Parameter(g.clone()) for g in gradients()]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    found = clip_gradients(ours, 0.5)
    torch.testing.assert_close(found, norm, rtol=1e-6, atol=0.0)
    for parameter, gradient in zip(theirs, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0.0)


def test_small_gradients_stay_as_they_are() -> None:
    ours = gradients()
    before = [g.clone() for g in ours]
    norm = clip_gradients(ours, 1e9)
    assert bits(norm) == bits(gradient_norm(before))
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert not any(g._version for g in ours)  # nothing was written


def test_a_factor_on_a_device_is_not_waited_for() -> None:
    rows = [torch.ones(3, device="meta")]
    scale_all(rows, torch.ones((), device="meta"))  # whose value cannot be read
    assert rows[0]._version == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_norm(bad: float) -> None:
    norm = clip_gradients([torch.ones(3), torch.tensor([1.0, bad])], 1.0)
    assert not torch.isfinite(norm)


def test_a_number_is_scaled_as_an_element_of_a_shard_is() -> None:
    """Beside fp64 the factor is fp64: a gradient [] would be multiplied in another precision."""
    generator = torch.Generator().manual_seed(3)
    for value in torch.randn(200, generator=generator):
        wide = torch.full((3,), 2.7, dtype=torch.float64)
        number, row = value.clone(), value.reshape(1).clone()
        clip_gradients([number, wide.clone()], 0.3)
        clip_gradients([row, wide.clone()], 0.3)
        assert number == row[0]


def test_norms_in_rows_are_those_of_the_blocks() -> None:
    """As a GPU takes them: whole blocks together, in rooms of 256, and the rest; order is kept."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3, BLOCK, 0, BLOCK, BLOCK - 1, *[BLOCK] * 256, 1]
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    blocks = [
        torch.randn(size, generator=generator).to(kinds[place % 4])
        for place, size in enumerate(sizes)
    ]
    torch.testing.assert_close(norms_in_rows(blocks), norms_of_blocks(blocks))
    assert torch.equal(norms_in_rows(blocks[1:2]), norms_in_rows(blocks)[1:2])
