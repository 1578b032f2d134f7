"""Differences against numpy's own spacing; bounds that hold, and that no mistake fits into; the
rules for buffers and for the weights after a meeting; what is said of a finding."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.commands.verify.compare import (
    UNIT_ROUNDOFF,
    Difference,
    add_up,
    clip_factor,
    compare,
    gradient_bounds,
    norm_bound,
    part_of_bound,
    update_bounds,
)
from gradsync.commands.verify.judge import common_ratio, minority, moved_rightly, wrong_meeting
from gradsync.commands.verify.record import State
from gradsync.commands.verify.reference import MicroBatchResult
from gradsync.commands.verify.result import Finding, Kind, Result
from gradsync.commands.verify.settings import CLIP_NORM, Promise

NAN, INF, ONE = torch.tensor([math.nan]), torch.tensor([math.inf]), torch.ones(1)


@pytest.mark.parametrize(
    ("got", "expected", "found"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.5, 8.0]), (4.0, 0.5, False)),  # of the largest
        (None, torch.tensor([0.0, 3.0]), (3.0, 1.0, False)),  # zeros, but not equal
        (torch.zeros(2), None, (0.0, 0.0, False)),
        (NAN, ONE, (math.inf, math.inf, False)),
        (INF, ONE, (math.inf, math.inf, False)),
        (NAN, NAN, (0.0, 0.0, True)),
        (torch.tensor([0.0]), torch.tensor([-0.0]), (0.0, 0.0, False)),  # other bits
        (torch.ones(2), torch.ones(3), (math.inf, math.inf, False)),
        (torch.ones(2), torch.ones(2).double(), (math.inf, math.inf, False)),
        (torch.tensor(6), torch.tensor(8), (2.0, 0.25, False)),
    ],
)
def test_two_tensors(
    got: Tensor | None, expected: Tensor | None, found: tuple[float, float, bool]
) -> None:
    absolute, relative, equal = compare(got, expected)
    assert (absolute, relative, equal) == found


def test_the_first_step_and_name_are_kept() -> None:
    found = Difference()
    found.include(0, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert found.bitwise
    found.include(1, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": None})
    found.include(2, {"a": torch.zeros(1)}, {"a": torch.ones(1)})
    assert (found.first_step, found.first_name, found.bitwise) == (1, "b", False)
    assert found.max_abs == 1.0


FP32 = Promise()


def micro_batches(count: int, seed: int = 0) -> list[MicroBatchResult]:
    """Gradients with much cancellation, and weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    return [
        MicroBatchResult(
            index=index,
            weight=1.0 + index,
            loss_sum=float(index),
            gradient={"w": torch.randn(500, generator=generator) * 10.0 ** (index % 3)},
            buffers={},
        )
        for index in range(count)
    ]


def test_unit_roundoff_is_torchs() -> None:
    names = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
    for name, dtype in (names | {"bf16": torch.bfloat16}).items():
        assert UNIT_ROUNDOFF[name] == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_any_order_of_sums_stays_inside(count: int) -> None:
    results = micro_batches(count)
    exact = add_up(results)
    assert exact.loss_sum == sum(range(count))  # losses are added in fp64
    assert exact.loss_sum_bound < 1e-14 * exact.weight
    bounds = gradient_bounds(exact, FP32, 4)
    worst = 0.0
    for seed in range(20):
        order = list(results)
        random.Random(seed).shuffle(order)
        total = torch.zeros(500)
        for result in order:
            total = total + result.gradient["w"]
        mean = (total / 4) * (4 / exact.weight)  # as a mechanism does that averages over ranks
        norm = float(mean.norm())
        mean = mean * min(1.0, CLIP_NORM / (norm + 1e-6))
        assert abs(norm - exact.norm()) <= norm_bound(exact, bounds)
        factor = clip_factor(norm)
        part = part_of_bound(mean, exact.means()["w"] * factor, bounds["w"] * factor)
        worst = max(worst, part)
    assert worst <= 1.0
    assert worst > 0.01 or count == 1  # a single one is exact


@pytest.mark.parametrize("mistake", ["one missing", "in bf16", "weight off by one", "nan"])
def test_mistakes_lie_outside(mistake: str) -> None:
    results = micro_batches(5)
    exact = add_up(results)
    total = torch.zeros(500)
    for result in results[1:] if mistake == "one missing" else results:
        gradient = result.gradient["w"]
        total += gradient.bfloat16().float() if mistake == "in bf16" else gradient
    mean = total / (exact.weight + (mistake == "weight off by one"))
    if mistake == "nan":
        mean[3] = math.nan
    bounds = gradient_bounds(exact, FP32, 2)
    assert part_of_bound(mean, exact.means()["w"], bounds["w"]) > 100


@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_wire_has_its_own_bound(wire: str, dtype: torch.dtype) -> None:
    results = micro_batches(4)
    exact = add_up(results)
    parts = [sum(r.gradient["w"] for r in results[i : i + 2]) for i in (0, 2)]
    scale = 64.0 if wire == "fp16" else 1.0
    total = sum((torch.as_tensor(part) * scale).to(dtype) for part in parts)
    mean = torch.as_tensor(total).float() / scale / exact.weight
    wide = gradient_bounds(exact, Promise(kind="lossy", wire=wire), 2)
    narrow = gradient_bounds(exact, FP32, 2)
    assert part_of_bound(mean, exact.means()["w"], wide["w"]) <= 1.0
    assert part_of_bound(mean, exact.means()["w"], narrow["w"]) > 10
    alone = gradient_bounds(exact, Promise(kind="lossy", wire=wire), 1)
    assert torch.equal(alone["w"], narrow["w"])  # one rank sends nothing


def test_the_norm_of_very_many_numbers_has_no_bound() -> None:
    exact = add_up(micro_batches(2))
    bounds = gradient_bounds(exact, FP32, 2)
    assert norm_bound(exact, bounds) < 1e-3 * exact.norm()
    exact.total["w"] = torch.zeros(1).expand(2**24)
    assert norm_bound(exact, bounds) == math.inf


# -- the optimizer, buffers, meetings ------------------------------------------------------------

SIZE = 1000


def one_step(**options: Any) -> tuple[dict[str, Tensor], Any]:
    """Two optimizer steps; what the second one saw and left."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE))
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, **options}
    optimizer = torch.optim.AdamW([weight], **settings)
    for step in range(2):
        before = {slot: value.clone() for slot, value in optimizer.state[weight].items()}
        start = weight.detach().clone()
        torch.manual_seed(10 + step)
        weight.grad = torch.randn(SIZE) * 10.0 ** torch.randint(-6, 3, (SIZE,))
        optimizer.step()
    after = {slot: value.clone() for slot, value in optimizer.state[weight].items()}
    assert weight.grad is not None
    bounds = update_bounds(
        "w",
        group=optimizer.param_groups[0],
        weight=start,
        gradient=weight.grad,
        before={f"{slot}/w": value for slot, value in before.items()},
        after={f"{slot}/w": value for slot, value in after.items()},
    )
    return bounds, (weight.detach(), after)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_another_implementation_stays_inside(weight_decay: float) -> None:
    bounds, (weight, state) = one_step(weight_decay=weight_decay, foreach=False)
    others = {"foreach": True}, {"fused": True}
    for other in others:
        _, (again, again_state) = one_step(weight_decay=weight_decay, **other)
        assert bool(((again.double() - weight.double()).abs() <= bounds[""]).all())
        for slot, bound in bounds.items():
            if slot:
                difference = (again_state[slot].double() - state[slot].double()).abs()
                assert bool((difference <= bound).all())


def test_another_formula_lies_outside() -> None:
    bounds, (weight, _) = one_step()
    for change in (
        {"lr": 1.001e-2},
        {"weight_decay": 0.101},
        {"eps": 1e-7},
        {"betas": (0.9, 0.99)},
    ):
        _, (other, _) = one_step(**change)
        assert bool(((other.double() - weight.double()).abs() > bounds[""]).any()), change


def test_buffers_move_by_the_mean_over_micro_batches() -> None:
    start = torch.tensor([1.0, 2.0])
    ends = [torch.tensor([1.5, 2.0]), torch.tensor([0.5, 4.0])]
    assert moved_rightly(start, torch.tensor([1.0, 3.0]), ends)
    assert not moved_rightly(start, torch.tensor([1.0, 4.0]), ends)  # the last one's
    assert not moved_rightly(start, torch.tensor([1.0, 5.0]), ends)  # the sum
    assert moved_rightly(start, start.clone(), [start.clone()])
    assert not moved_rightly(start, start + 1e-6, [start.clone()])
    # One that did not touch it does not count.
    assert moved_rightly(start, torch.tensor([1.5, 2.0]), [ends[0], start.clone()])
    # Counters move by the largest change.
    count = torch.tensor(7)
    assert moved_rightly(count, torch.tensor(8), [torch.tensor(8), torch.tensor(8)])
    assert not moved_rightly(count, torch.tensor(9), [torch.tensor(8), torch.tensor(8)])
    assert moved_rightly(count, count, [])


def state(weight: float, momentum: float | None = None) -> State:
    extra = {} if momentum is None else {"outer_momentum/w": torch.full((3,), momentum)}
    weights = {"w": torch.full((3,), weight)}
    return State(weights=weights, buffers={}, optimizer={}, description={}, extra=extra)


@pytest.mark.parametrize(
    ("begun", "after", "is_right"),
    [
        (state(1), state(0.6), True),  # local SGD: the mean
        (state(1), state(0.6001), False),
        (state(1), state(0.8), False),
        # DiLoCo: delta = momentum = 0.4, Nesterov: delta + 0.9 momentum = 0.76, times 0.7
        (state(1), state(1 - 0.7 * 0.76, 0.4), True),
        (state(1), state(1 - 0.7 * 0.4, 0.4), False),
        (state(1), state(1 - 0.7 * 0.76, 0.41), False),
        # momentum = 0.9 + 0.4 = 1.3
        (state(1, 1), state(1 - 0.7 * (0.4 + 0.9 * 1.3), 1.3), True),
        (state(1, 1), state(1 - 0.7 * 0.76, 0.4), False),
    ],
)
def test_where_ranks_meet(begun: State, after: State, is_right: bool) -> None:
    """Two ranks end a round at 0.8 and 0.4."""
    ends = [{"w": torch.full((3,), 0.8)}, {"w": torch.full((3,), 0.4)}]
    assert (wrong_meeting(begun, ends, after) == "") is is_right


# -- what is said --------------------------------------------------------------------------------


def test_the_ratio_needs_the_same_direction() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(100), torch.randn(100)
    assert common_ratio({"a": 3 * a, "b": 3 * b}, {"a": a, "b": b}) == pytest.approx(3.0)
    assert common_ratio({"a": 3 * a, "b": b}, {"a": a, "b": b}) is None
    assert common_ratio({"a": a}, {"a": a, "b": a}) is None  # a missing one is no match
    for got, expected in ((a + 0.1 * b, a), (0 * a, a), (a, 0 * a), (a * math.nan, a)):
        assert common_ratio({"a": got}, {"a": expected}) is None


def test_minority() -> None:
    assert minority(["x", "x", "x"]) == ()
    assert minority(["x", "y", "x"]) == (1,)
    assert minority(["x", "y"]) == (1,)
    assert minority(["y", "x", "x"]) == (0,)


def test_every_sentence_says_what_why_and_what_to_do() -> None:
    result = Result(strategy="naive", world_size=2, model="mlp", dtype="fp32", promise="rounding")
    found = [Finding(kind=k, step=3, names=tuple("vwxyz"), ranks=(1,), detail="7") for k in Kind]
    for place, finding in enumerate(found):
        result.explain([*found[:place:-1], finding])  # the first kind tells most
        words = rf"step 3, 'v', 'w', 'x', 2 more, rank 1: {finding.kind} \(7\); [^.]+\. [A-Z].*\."
        assert re.fullmatch(words, result.sentence)
