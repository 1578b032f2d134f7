"""The optimizer's bound, the rule for buffers, and the weights that ranks hold after a meeting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.verify.compare import update_bounds
from gradsync.verify.judge import Meetings, _moved_rightly
from gradsync.verify.record import StepTrace, Trace
from gradsync.verify.run import Saved

SIZE = 1000


def one_step(kind: str, *, scale: float = 1.0, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Two optimizer steps; what the second one saw and left."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE))
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, **options}
    maker = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizer = maker([weight], **settings)
    for step in range(2):
        before = {slot: value.clone() for slot, value in optimizer.state[weight].items()}
        start = weight.detach().clone()
        torch.manual_seed(10 + step)
        weight.grad = torch.randn(SIZE) * scale * 10.0 ** torch.randint(-6, 3, (SIZE,))
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [("adamw", {}), ("sgd", {"momentum": 0.9}), ("adamw", {"weight_decay": 0.0})],
)
def test_another_implementation_stays_inside(kind: str, options: dict[str, Any]) -> None:
    bounds, (weight, state) = one_step(kind, **options, foreach=False)
    others = {"foreach": True}, {"fused": True}
    for other in others:
        _, (again, again_state) = one_step(kind, **options, **other)
        assert bool(((again.double() - weight.double()).abs() <= bounds[""]).all())
        for slot, bound in bounds.items():
            if slot:
                difference = (again_state[slot].double() - state[slot].double()).abs()
                assert bool((difference <= bound).all())


def test_another_formula_lies_outside() -> None:
    bounds, (weight, _) = one_step("adamw")
    for change in (
        {"lr": 1.001e-2},
        {"weight_decay": 0.101},
        {"eps": 1e-7},
        {"betas": (0.9, 0.99)},
    ):
        _, (other, _) = one_step("adamw", **change)
        assert bool(((other.double() - weight.double()).abs() > bounds[""]).any()), change


def test_buffers_move_by_the_mean_over_leaves() -> None:
    start = torch.tensor([1.0, 2.0])
    ends = [torch.tensor([1.5, 2.0]), torch.tensor([0.5, 4.0])]
    assert _moved_rightly(start, torch.tensor([1.0, 3.0]), ends)
    assert not _moved_rightly(start, torch.tensor([1.0, 4.0]), ends)  # the last leaf's
    assert not _moved_rightly(start, torch.tensor([1.0, 5.0]), ends)  # the sum
    assert _moved_rightly(start, start.clone(), [start.clone()])
    assert not _moved_rightly(start, start + 1e-6, [start.clone()])
    # A leaf that did not touch it does not count.
    assert _moved_rightly(start, torch.tensor([1.5, 2.0]), [ends[0], start.clone()])


def test_counters_move_by_the_largest_change() -> None:
    start = torch.tensor(7)
    assert _moved_rightly(start, torch.tensor(8), [torch.tensor(8), torch.tensor(8)])
    assert not _moved_rightly(start, torch.tensor(9), [torch.tensor(8), torch.tensor(8)])
    assert _moved_rightly(start, start, [])


def rounds(strategy: str, after: Tensor, saved: Saved | None = None) -> str:
    """One round of two steps from 1.0; two ranks end it at 0.8 and 0.4."""
    begun = {"w": torch.ones(3)}
    steps = [StepTrace(0, before=begun), StepTrace(1, before=begun, after={"w": after})]
    meetings = Meetings(strategy, Trace(("w",), steps=steps), saved)
    return meetings.wrong_weight(1, [{"w": torch.full((3,), 0.8)}, {"w": torch.full((3,), 0.4)}])


def test_local_sgd_meets_at_the_mean() -> None:
    assert rounds("local_sgd", torch.full((3,), 0.6)) == ""
    assert rounds("local_sgd", torch.full((3,), 0.6001)) == "w"
    assert rounds("local_sgd", torch.full((3,), 0.8)) == "w"


def test_diloco_takes_an_outer_step() -> None:
    # delta = 0.4, velocity = 0.4, Nesterov: delta + 0.9 velocity = 0.76, times 0.7
    assert rounds("diloco", torch.full((3,), 1 - 0.7 * 0.76)) == ""
    assert rounds("diloco", torch.full((3,), 1 - 0.7 * 0.4)) == "w"  # without momentum
    assert rounds("diloco", torch.full((3,), 0.6)) == "w"


def test_diloco_goes_on_with_a_saved_momentum() -> None:
    saved = Saved(
        weights={},
        buffers={},
        optimizer=({}, {}),
        data={},
        strategy="diloco",
        extra={"outer_momentum/w": torch.ones(3)},
    )
    # velocity = 0.9 + 0.4 = 1.3
    assert rounds("diloco", torch.full((3,), 1 - 0.7 * (0.4 + 0.9 * 1.3)), saved) == ""
