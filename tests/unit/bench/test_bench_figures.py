"""From samples of `bench sync` and `scaling` to figures, by hand."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from gradsync.commands.bench import scaling
from gradsync.commands.bench.experiment import Spread, interval, spread
from gradsync.commands.bench.scaling import ScalingOptions, ScalingPlan, judge, parse_world_sizes
from gradsync.commands.bench.sync import row_of, rows_csv
from gradsync.commands.bench.sync_plan import (
    BenchPlan,
    SyncSettings,
    bench_plan,
    parse_contestants,
    turns,
)
from gradsync.world import World
from support.bench_results import ENVIRONMENT


def test_medians_and_quartiles() -> None:
    assert spread([9.0, 1.0, 3.0, 5.0, 7.0]) == Spread(median=5.0, low=3.0, high=7.0, count=5)


def test_the_interval_covers_what_rounds_do() -> None:
    assert interval([0.9] * 5) == (0.9, 0.9)
    values = [0.80, 0.82, 0.84, 0.86, 0.88, 0.90, 0.92]
    low, high = interval(values)
    assert min(values) <= low < 0.86 < high <= max(values)
    wide_low, wide_high = interval(values, doubt=0.005)
    assert wide_low <= low < high <= wide_high
    assert (wide_low, wide_high) != (low, high)
    assert interval(values) == (low, high)


CHECKED = {"losses": [5.5, 5.0], "memory_bytes": 2**20, "operations": 3.0, "sent_bytes": 100.0}


def rank(*step_s: float) -> dict[str, Any]:
    """Rounds of one step each."""
    return {"step_s": [[s] for s in step_s], "compute_s": [[0.5 * s] for s in step_s], **CHECKED}


@pytest.fixture
def plan() -> BenchPlan:
    settings = SyncSettings(model_size="tiny", rounds=3, num_steps=1, context_length=100)
    return bench_plan(settings, parse_contestants("naive,fsdp"), 2, 4)


@pytest.fixture
def results() -> list[dict[str, Any]]:
    """Three rounds; in the second one something else slowed down all ranks."""
    found = {
        "none": [rank(0.1, 0.4, 0.1)] * 2,
        "naive": [rank(0.15, 0.6, 0.12), rank(0.11, 0.5, 0.16)],
        "fsdp": [rank(0.09, 0.36, 0.09)] * 2,
    }
    return [{"contestants": found}]


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    """Ranks that never meet do not wait in each step for another one."""
    assert turns([[[1.0, 4.0], [1.0, 1.0]], [[2.0, 4.0], [0.0, 5.0]]]) == [3.0, 2.5]


def rows_of(plan: BenchPlan, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row_of(plan, each, results) for each in plan.contestants]


def test_rows(plan: BenchPlan, results: list[dict[str, Any]]) -> None:
    none, naive, fsdp = rows_of(plan, results)
    assert naive["total_ms"]["median"] == pytest.approx(160)
    assert naive["ratio"]["median"] == pytest.approx(1.5)  # of the same round: 1.5, 1.5, 1.6
    assert naive["exposed_ms"] == pytest.approx(60)  # 50, 200, 60
    assert naive["compute_ms"] == pytest.approx(80)
    assert naive["tokens_per_s"] == pytest.approx(2 * 4 * 100 / 0.16)
    assert fsdp["exposed_ms"] == 0.0
    assert fsdp["ratio"]["median"] == pytest.approx(0.9)
    assert none["ratio"]["median"] == 1


def test_csv_begins_with_the_common_columns(plan: BenchPlan, results: list[dict[str, Any]]) -> None:
    text = rows_csv(plan, rows_of(plan, results))
    first = "model_size,d_model,num_layers,total_time_ms,compute_time_ms,comm_time_ms,"
    assert text.startswith(first + "comm_fraction,num_comm_ops,")
    naive = list(csv.DictReader(io.StringIO(text)))[1]
    assert [naive[name] for name in list(naive)[:3]] == ["tiny", "192", "4"]
    figures = [float(naive[name]) for name in list(naive)[3:8]]
    assert figures == pytest.approx([160, 80, 60, 0.375, 3])
    assert naive["contestant"] == "naive"
    assert (naive["world_size"], naive["batch_size"]) == ("2", "4")


def scaling_planned(mode: str = "both", **changes: Any) -> ScalingPlan:
    asked = {"strategy": "bucketed", "world_sizes": "4,2", "context_length": 10}
    return scaling.plan_of(ScalingOptions(mode=mode, **{**asked, **changes}), World())


def test_one_rank_without_a_wrapper_is_the_baseline() -> None:
    found = scaling_planned()
    assert found.world_sizes == (1, 2, 4)
    assert [(each.label, each.name, each.world_size) for each in found.contestants] == [
        ("1 rank, 1 a rank", "none", 1),
        ("2 ranks, 1 a rank", "bucketed", 2),
        ("4 ranks, 1 a rank", "bucketed", 4),  # of both modes
        ("1 rank, 4 a rank", "none", 1),
        ("2 ranks, 2 a rank", "bucketed", 2),
    ]
    sizes = [parse_world_sizes("", cores) for cores in (1, 2, 7, 8)]
    assert sizes == [(1, 2), (1, 2), (1, 2, 4), (1, 2, 4, 8)]


def test_efficiencies_compare_rounds_with_themselves() -> None:
    planned = scaling_planned(world_sizes="2")
    step_s = {
        "1 rank, 1 a rank": [1.0, 1.0, 4.0, 1.0],
        "2 ranks, 1 a rank": [1.25, 1.25, 5.0, 1.25],
        "1 rank, 2 a rank": [2.25, 2.25, 9.0, 2.25],
    }
    results: list[dict[str, Any]] = [{"contestants": {}} for _ in planned.world_sizes]
    for label, seconds in step_s.items():
        found = results[label.startswith("2")]["contestants"]
        found[label] = [{"step_s": [[second] for second in seconds]}]
    results[-1] |= {"environment": ENVIRONMENT, "device": "cpu"}
    scaling.findings_of(planned, {"results": results}).show(stream := io.StringIO())
    assert "80.0% (80.0%-80.0%)" in stream.getvalue()
    points = scaling.points_of(planned, results)
    weak, strong = points[1], points[3]
    assert [point["mode"] for point in points] == ["weak", "weak", "strong", "strong"]
    assert (weak["efficiency"], weak["speedup"]) == pytest.approx((0.8, 1.6))
    assert (weak["low"], weak["high"]) == pytest.approx((0.8, 0.8))
    assert weak["verdict"] == "no"
    assert (strong["efficiency"], strong["speedup"]) == pytest.approx((0.9, 1.8))
    assert strong["verdict"] == "yes"
    assert points[0]["efficiency"] == points[2]["efficiency"] == 1
    assert strong["tokens_per_s"] == pytest.approx(2 * 10 / 1.25)


def test_verdicts() -> None:
    intervals = ((0.85, 0.9), (0.7, 0.849), (0.8, 0.86), (0.8, 0.85))
    found = [judge(low, high) for low, high in intervals]
    assert found == ["yes", "no", "cannot tell", "cannot tell"]
