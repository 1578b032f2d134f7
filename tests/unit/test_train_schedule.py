"""The learning rate of each step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradsync.errors import ConfigError
from gradsync.train.config import OptimConfig
from gradsync.train.learner import learning_rate

UNIT = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=2, decay_fraction=0.5)


def curve(config: OptimConfig, total_steps: int) -> list[float]:
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


def test_cosine() -> None:
    # 0.1 + 0.45 (1 + cos x) for x = 0, 1/4, 1/2, 3/4, 1 of pi; the root of 1/2 is 0.70710678
    config = replace(UNIT, schedule="cosine")
    expected = [0.5, 1.0, 1.0, 0.868198052, 0.55, 0.231801948, 0.1]
    assert curve(config, 7) == pytest.approx(expected, rel=1e-8)


def test_warm_up_stable_decay() -> None:
    # The last five of ten steps fall by 0.9 / 5 each.
    config = replace(UNIT, schedule="wsd")
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1]
    assert curve(config, 10) == pytest.approx(expected, rel=1e-12)


def test_constant() -> None:
    config = replace(UNIT, schedule="constant", warmup_steps=4)
    assert curve(config, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_peak_and_the_floor_scale() -> None:
    config = replace(UNIT, schedule="cosine", lr=6e-4, min_lr_ratio=0.0)
    rates = curve(config, 7)
    assert rates[1:3] == [6e-4, 6e-4]
    assert rates[-1] == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(schedule: str) -> None:
    assert curve(replace(UNIT, schedule=schedule, warmup_steps=0), 10)[0] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_reaches_the_peak(schedule: str) -> None:
    config = replace(UNIT, schedule=schedule, warmup_steps=100)
    assert curve(config, 4) == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(replace(config, warmup_steps=0), 0, 1) > 0  # one step alone


def test_decay_over_a_share_that_rounds_to_no_step() -> None:
    rates = curve(replace(UNIT, schedule="wsd", decay_fraction=0.001), 10)
    assert rates[2:] == pytest.approx([1.0] * 7 + [0.1])


configs = st.builds(
    OptimConfig,
    lr=st.floats(1e-6, 10.0),
    min_lr_ratio=st.floats(0.0, 1.0),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup_steps=st.integers(0, 50),
    decay_fraction=st.floats(0.01, 1.0),
)


@given(configs, st.integers(1, 80))
def test_up_then_down_between_floor_and_peak(config: OptimConfig, total_steps: int) -> None:
    rates = curve(config, total_steps)
    warmup = min(config.warmup_steps, total_steps)
    rounding = 1e-12 * config.lr
    assert max(rates) <= config.lr + rounding
    assert min(rates) >= 0
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a + rounding >= b for a, b in pairwise(falling))
    assert all(rate + rounding >= config.lr * config.min_lr_ratio for rate in falling)
    if warmup:
        assert rising[0] == pytest.approx(config.lr / warmup)
        assert rising[-1] == pytest.approx(config.lr)


@given(configs, st.integers(1, 80))
def test_the_last_step_has_the_floor(config: OptimConfig, total_steps: int) -> None:
    assume(config.schedule != "constant")
    assume(config.warmup_steps < total_steps - 1)
    last = learning_rate(config, total_steps - 1, total_steps)
    assert last == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9, abs=1e-15)


@given(configs, st.integers(1, 80), st.integers(0, 79))
def test_a_pure_function_of_the_step(config: OptimConfig, total_steps: int, step: int) -> None:
    """Asked out of order, as after a resume, it says the same."""
    assume(step < total_steps)
    assert learning_rate(config, step, total_steps) == curve(config, total_steps)[step]


def test_a_decay_that_begins_before_the_warm_up_ends_still_has_the_peak() -> None:
    config = OptimConfig(
        lr=1.0, schedule="wsd", warmup_steps=6, decay_fraction=0.8, min_lr_ratio=0.1
    )
    rates = curve(config, 10)
    assert rates[6] == 1.0
    assert rates[9] == pytest.approx(0.1)
    assert rates[6:] == sorted(rates[6:], reverse=True)


@pytest.mark.parametrize(
    ("scaling", "tokens", "peak", "line"),
    [
        ("linear", 524_288, 8e-3, "lr 0.001 x 524288/65536 = 0.008 (linear)"),
        ("sqrt", 262_144, 2e-3, "lr 0.001 x sqrt(262144/65536) = 0.002 (sqrt)"),
        ("linear", 32_768, 5e-4, "lr 0.001 x 32768/65536 = 0.0005 (linear)"),
    ],
)
def test_the_peak_and_the_floor_go_along_with_the_batch(
    scaling: Any, tokens: int, peak: float, line: str
) -> None:
    config = OptimConfig(lr=1e-3, lr_scaling=scaling, lr_base_batch=65_536, warmup_steps=2)
    rates = curve(config.scaled(tokens), 9)
    assert max(rates) == pytest.approx(peak, rel=1e-12)
    assert rates[0] == pytest.approx(peak / 2)
    assert rates[-1] == pytest.approx(0.1 * peak)
    assert config.describe_scaling(tokens) == line


def test_nothing_is_scaled_unless_asked_for() -> None:
    assert UNIT.scaled(7) == UNIT
    assert UNIT.describe_scaling(7) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scaling": "sqrt"}, "lr_scaling=sqrt and optim.lr_base_batch=None: give both"),
        ({"lr_base_batch": 8}, "lr_scaling=none and optim.lr_base_batch=8: give both"),
        ({"lr_scaling": "linear", "lr_base_batch": 0}, "lr_base_batch must be at least 1; got 0"),
        ({"lr_scaling": "cubic", "lr_base_batch": 8}, "must be one of none, linear, sqrt"),
    ],
)
def test_half_a_scaling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**options)
