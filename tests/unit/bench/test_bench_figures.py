"""From samples of `bench sync` and `scaling` to figures, by hand."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.commands.bench import scaling
from gradsync.commands.bench.contestants import parse_contestants, with_ideals
from gradsync.commands.bench.report import Spread, interval, percentile, ratios, spread
from gradsync.commands.bench.scaling import (
    ScalingOptions,
    ScalingPlan,
    judge,
    notes_of,
    usual_sizes,
)
from gradsync.commands.bench.sync import row_of, rows_csv
from gradsync.commands.bench.sync_plan import BenchPlan, SyncSettings, bench_plan, turns
from gradsync.world import World
from support.bench_results import ENVIRONMENT


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 50, 5.0),
        ([4.0, 2.0], 50, 3.0),
        ([3.0, 1.0, 2.0], 0, 1.0),
        ([3.0, 1.0, 2.0], 100, 3.0),
        ([0.0, 10.0, 20.0, 30.0, 40.0], 95, 38.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_quartiles_hold_the_middle_half() -> None:
    assert spread([9.0, 1.0, 3.0, 5.0, 7.0]) == Spread(median=5.0, low=3.0, high=7.0, count=5)


@given(st.lists(st.floats(0.001, 1000), min_size=1))
def test_a_spread_is_in_order_and_within_its_values(values: list[float]) -> None:
    found = spread(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_ratios_go_round_by_round() -> None:
    assert ratios([2.0, 30.0], [1.0, 10.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


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


def rank(step_s: list[list[float]], comm_s: float | None) -> dict[str, Any]:
    compute_s = [[0.5 * second for second in steps] for steps in step_s]
    return {"step_s": step_s, "compute_s": compute_s, "comm_s": comm_s, **CHECKED}


@pytest.fixture
def plan() -> BenchPlan:
    settings = SyncSettings(model_size="tiny", rounds=3, num_steps=1, context_length=100)
    chosen = with_ideals(parse_contestants("naive,fsdp,torch_ddp"), same_allocator=False)
    return bench_plan(settings, [(each, 2, 4) for each in chosen])


@pytest.fixture
def results() -> list[dict[str, Any]]:
    """Three rounds; in the second one something else slowed down all ranks."""
    keeping = {
        "none": [rank([[0.1], [0.4], [0.1]], 0.0)] * 2,
        "naive": [
            rank([[0.15], [0.6], [0.12]], 0.06),
            rank([[0.11], [0.5], [0.16]], 0.04),
        ],
        "fsdp": [rank([[0.09], [0.36], [0.09]], None)] * 2,
    }
    default = {
        "none (default malloc)": [rank([[0.2], [0.8], [0.2]], 0.0)] * 2,
        "torch_ddp": [rank([[0.3], [1.2], [0.3]], 0.2)] * 2,
    }
    return [
        {"keeps_memory": True, "contestants": keeping},
        {"keeps_memory": False, "contestants": default},
    ]


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    """Ranks that never meet do not wait in each step for another one."""
    assert turns([[[1.0, 4.0], [1.0, 1.0]], [[2.0, 4.0], [0.0, 5.0]]]) == [3.0, 2.5]


def rows_of(plan: BenchPlan, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row_of(plan, entry, results) for entry in plan.entries]


def test_rows(plan: BenchPlan, results: list[dict[str, Any]]) -> None:
    none, default, naive, fsdp, ddp = rows_of(plan, results)
    assert naive["total_ms"]["median"] == pytest.approx(160)
    assert naive["ratio"]["median"] == pytest.approx(1.5)  # of the same round: 1.5, 1.5, 1.6
    assert naive["exposed_ms"] == pytest.approx(60)  # 50, 200, 60
    assert naive["comm_ms"] == pytest.approx(60)
    assert naive["comm_fraction"] == pytest.approx(60 / 160)
    assert naive["compute_ms"] == pytest.approx(80)
    assert naive["tokens_per_s"] == pytest.approx(2 * 4 * 100 / 0.16)
    assert (fsdp["exposed_ms"], fsdp["comm_ms"], fsdp["comm_fraction"]) == (0.0, None, None)
    assert fsdp["ratio"]["median"] == pytest.approx(0.9)
    assert ddp["ratio"]["median"] == pytest.approx(1.5)  # to the ideal of its own setting
    assert none["ratio"]["median"] == default["ratio"]["median"] == 1
    kept = [row["keep_memory"] for row in (none, default, naive, ddp)]
    assert kept == [True, False, True, False]


def test_csv_begins_with_the_common_columns(plan: BenchPlan, results: list[dict[str, Any]]) -> None:
    text = rows_csv(plan, rows_of(plan, results))
    first = "model_size,d_model,num_layers,total_time_ms,compute_time_ms,comm_time_ms,"
    assert text.startswith(first + "comm_fraction,num_comm_ops,")
    lines = list(csv.DictReader(io.StringIO(text)))
    naive, fsdp = lines[2], lines[3]
    assert [naive[name] for name in list(naive)[:3]] == ["tiny", "192", "4"]
    figures = [float(naive[name]) for name in list(naive)[3:8]]
    assert figures == pytest.approx([160, 80, 60, 0.375, 3])
    assert naive["contestant"] == "naive"
    assert (naive["world_size"], naive["batch_size"]) == ("2", "4")
    assert (naive["keep_memory"], lines[4]["keep_memory"]) == ("True", "False")
    assert (fsdp["comm_time_ms"], fsdp["comm_fraction"]) == ("", "")


def scaling_planned(mode: str = "both", **changes: Any) -> ScalingPlan:
    asked = {"strategy": "bucketed", "world_sizes": "4,2", "context_length": 10}
    return scaling.plan_of(ScalingOptions(mode=mode, **{**asked, **changes}), World())


def test_one_rank_without_a_wrapper_is_the_baseline() -> None:
    found = scaling_planned()
    assert found.plan.world_sizes == (1, 2, 4)
    assert [(e.label, e.contestant.name, e.worker_set) for e in found.plan.entries] == [
        ("1 rank, 1 a rank", "none", 0),
        ("2 ranks, 1 a rank", "bucketed", 1),
        ("4 ranks, 1 a rank", "bucketed", 2),  # of both modes
        ("1 rank, 4 a rank", "none", 0),
        ("2 ranks, 2 a rank", "bucketed", 1),
    ]
    weak, strong = (point for point in found.points if point.world_size == 4)
    assert found.entry(weak) is found.entry(strong)
    assert [usual_sizes(cores) for cores in (1, 2, 7, 8)] == ["1,2", "1,2", "1,2,4", "1,2,4,8"]


def test_efficiencies_compare_rounds_with_themselves() -> None:
    planned = scaling_planned(world_sizes="2")
    step_s = {
        "1 rank, 1 a rank": [1.0, 1.0, 4.0, 1.0],
        "2 ranks, 1 a rank": [1.25, 1.25, 5.0, 1.25],
        "1 rank, 2 a rank": [2.25, 2.25, 9.0, 2.25],
    }
    labels = [{e.label for e in planned.plan.entries if e.worker_set == n} for n in range(2)]
    results: list[dict[str, Any]] = [
        {"contestants": {name: [{"step_s": [[s] for s in step_s[name]]}] for name in names}}
        for names in labels
    ]
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


def test_verdicts_and_what_is_said_of_one_host() -> None:
    intervals = ((0.85, 0.9), (0.7, 0.849), (0.8, 0.86), (0.8, 0.85))
    found = [judge(low, high) for low, high in intervals]
    assert found == ["yes", "no", "cannot tell", "cannot tell"]
    same, many = notes_of(scaling_planned(), on_cpu=True, cores=2)
    assert "one host" in same
    assert "4 ranks x 1 thread want more than the 2 cores" in many
    assert len(notes_of(scaling_planned(), on_cpu=True, cores=4)) == 1
    assert notes_of(scaling_planned(), on_cpu=False, cores=2) == []
