"""The line through some times, and where it is kept."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import RunError
from gradsync.plan.collectives import (
    Fit,
    fit_line,
    fits_path,
    load_fits,
    quality,
    save_fits,
)

SIZES = [4**k for k in range(1, 16)]
MACHINE: dict[str, Any] = {
    **{"date": "2026-01-02", "cpu": "c", "cores": 2, "accelerator": None, "backend": "gloo"},
    **{"world_size": 2, "threads_per_rank": 1, "torch": "2", "num_nodes": 1, "dtype": "fp32"},
}


def fit(operation: str = "all_reduce", alpha_s: float = 1e-4) -> Fit:
    return Fit(
        operation=operation,
        algorithm="ring",
        alpha_s=alpha_s,
        beta_s_per_byte=1e-9,
        residual=0.1,
        worst=1.5,
        num_sizes=3,
    )


def test_an_exact_line_is_found() -> None:
    times = [2e-5 + 8e-10 * size for size in SIZES]
    alpha, beta = fit_line(SIZES, times)
    assert alpha == pytest.approx(2e-5)
    assert beta == pytest.approx(8e-10)
    assert quality(alpha, beta, SIZES, times) == pytest.approx((0, 1), abs=1e-9)


@pytest.mark.parametrize("outlier", range(len(SIZES)))
@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_one_disturbed_size_does_not_bend_it(outlier: int, factor: float) -> None:
    noise = random.Random(outlier)
    times = [(1e-4 + 8e-10 * size) * math.exp(noise.gauss(0, 0.05)) for size in SIZES]
    times[outlier] *= factor
    alpha, beta = fit_line(SIZES, times)
    assert alpha == pytest.approx(1e-4, rel=0.15)
    assert beta == pytest.approx(8e-10, rel=0.25)
    residual, worst = quality(alpha, beta, SIZES, times)
    assert residual < 0.15
    assert worst == pytest.approx(20, rel=0.35)


def test_short_messages_count_as_much_as_long_ones() -> None:
    """Plain least squares would give up 4 B for a millionth of 1 GiB."""
    times = [1e-5 if size < 2**20 else 1e-9 * size * 1.3 for size in SIZES]
    alpha, _ = fit_line(SIZES, times)
    assert alpha == pytest.approx(1e-5, rel=0.1)


def test_neither_number_falls_below_zero() -> None:
    assert fit_line([4, 8], [0.1, 0.05])[1] == 0
    assert fit_line([4, 8], [0.1, 0.4])[0] == 0


@pytest.mark.parametrize(("sizes", "times"), [([4, 4], [1.0, 2.0]), ([4, 8], [0.0, 1.0])])
def test_no_line_through_that(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="no line through sizes"):
        fit_line(sizes, times)


def test_a_fit_predicts() -> None:
    assert fit().seconds(1e6) == pytest.approx(1.1e-3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path))
    return tmp_path


def test_fits_are_kept_for_their_machine(cache: Path) -> None:
    assert load_fits(MACHINE) == []
    path = save_fits(MACHINE, [fit(), fit("broadcast")])
    assert path.is_relative_to(cache)
    assert path == fits_path(MACHINE | {"date": "2027-01-01"})
    assert load_fits(MACHINE) == [fit(), fit("broadcast")]
    for name, value in (("dtype", "bf16"), ("world_size", 4), ("cpu", "d"), ("num_nodes", 2)):
        assert load_fits(MACHINE | {name: value}) == []


def test_new_fits_replace_only_their_own(cache: Path) -> None:
    save_fits(MACHINE, [fit(), fit("broadcast")])
    save_fits(MACHINE, [fit(alpha_s=5.0)])
    assert load_fits(MACHINE) == [fit(alpha_s=5.0), fit("broadcast")]


@pytest.mark.parametrize("text", ["", "{}", '{"fits": [{"alpha": 1}]}'])
def test_a_damaged_cache_is_named_and_replaced(
    text: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_fits(MACHINE, [fit("broadcast")])
    path.write_text(text)
    save_fits(MACHINE, [fit()])
    assert f"{path} cannot be used (" in caplog.text
    assert load_fits(MACHINE) == [fit()]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    (cache / "alpha-beta").touch()
    with pytest.raises(RunError, match="GRADSYNC_CACHE can name another cache"):
        save_fits(MACHINE, [fit()])
