"""What `bench scaling` measures, and how it comes to a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync.bench.plan import SyncSettings
from gradsync.bench.report import interval
from gradsync.bench.scaling import (
    ScalingPlan,
    judge,
    notes_of,
    points_of,
    scaling_plan,
    usual_sizes,
)
from gradsync.cli.main import main


def planned(**changes: Any) -> ScalingPlan:
    settings = SyncSettings(model_size="tiny", rounds=6, context_length=10)
    asked = {"strategy": "bucketed", "sizes": (1, 2, 4), "mode": "both", "batch_size": 1}
    return scaling_plan(settings, **{**asked, **changes})


def test_one_rank_without_a_wrapper_is_the_baseline() -> None:
    scaling = planned()
    assert scaling.plan.world_sizes == (1, 2, 4)
    assert [each.world_size for each in scaling.plan.sets] == [1, 2, 4]
    found = [
        (entry.label, entry.contestant.name, entry.worker_set) for entry in scaling.plan.entries
    ]
    assert found == [
        ("1 rank, 1 a rank", "none", 0),
        ("2 ranks, 1 a rank", "bucketed", 1),
        ("4 ranks, 1 a rank", "bucketed", 2),  # of both modes
        ("1 rank, 4 a rank", "none", 0),
        ("2 ranks, 2 a rank", "bucketed", 1),
    ]
    assert scaling.entry("strong", 4) is scaling.entry("weak", 4)


def results_of(scaling: ScalingPlan, step_s: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "contestants": {
                entry.label: [{"step_s": [[second] for second in step_s[entry.label]]}]
                for entry in scaling.plan.entries
                if entry.worker_set == number
            }
        }
        for number in range(len(scaling.plan.sets))
    ]


def test_efficiencies_compare_rounds_with_themselves() -> None:
    scaling = planned(sizes=(1, 2))
    step_s = {
        "1 rank, 1 a rank": [1.0, 1.0, 4.0, 1.0],
        "2 ranks, 1 a rank": [1.25, 1.25, 5.0, 1.25],
        "1 rank, 2 a rank": [2.25, 2.25, 9.0, 2.25],
    }
    points = points_of(scaling, results_of(scaling, step_s), threshold=0.85)
    weak, strong = points[1], points[3]
    assert [point.mode for point in points] == ["weak", "weak", "strong", "strong"]
    assert (weak.efficiency, weak.speedup) == pytest.approx((0.8, 1.6))
    assert (weak.low, weak.high) == pytest.approx((0.8, 0.8))
    assert weak.verdict == "no"
    assert (strong.efficiency, strong.speedup) == pytest.approx((0.9, 1.8))
    assert strong.verdict == "yes"
    assert points[0].efficiency == points[2].efficiency == 1
    assert strong.tokens_per_s == pytest.approx(2 * 10 / 1.25)


def test_the_interval_covers_what_rounds_do() -> None:
    assert interval([0.9] * 5) == (0.9, 0.9)
    values = [0.80, 0.82, 0.84, 0.86, 0.88, 0.90, 0.92]
    low, high = interval(values)
    assert min(values) <= low < 0.86 < high <= max(values)
    assert interval(values) == (low, high)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.85, 0.9, "yes"),
        (0.7, 0.849, "no"),
        (0.8, 0.86, "cannot tell"),
        (0.8, 0.85, "cannot tell"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert judge(low, high, 0.85) == verdict


def test_what_is_said_of_one_host() -> None:
    same, many = notes_of(planned(), on_cpu=True, cores=2)
    assert "one host" in same
    assert "4 ranks x 1 thread(s) want more than the 2 cores" in many
    assert len(notes_of(planned(), on_cpu=True, cores=4)) == 1
    assert notes_of(planned(), on_cpu=False, cores=2) == []


def test_usual_sizes() -> None:
    assert [usual_sizes(cores) for cores in (1, 2, 7, 8)] == ["1,2", "1,2", "1,2,4", "1,2,4,8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-sizes", "1"], "name a number above 1"),
        (["--world-sizes", "two"], "'two' is not a number"),
        (["--world-sizes", "0,2"], "must be at least 1; got 0"),
        (["--mode", "sideways"], "--mode must be weak, strong or both"),
        (["--strategy", "bucketd"], "perhaps you meant 'bucketed'"),
        (["--strategy", "naive,flat"], "--strategy takes one name"),
        (["--world-sizes", "1,²"], "'²' is not a number"),
        (["--world-sizes=--2"], "'--2' is not a number"),
        (["--strategy", "flat:keep_memory=false"], "here all keep freed memory"),
        (["--rounds", "5"], "--rounds must be at least 6"),
        (["--threshold", "0"], "--threshold must be positive"),
        (["--threshold", "inf"], "--threshold must be a finite number"),
        (["--device", "cudax"], "--device must be one of auto, cpu, cuda"),
        (["--world-sizes", "2,3", "--mode", "strong"], "does not divide among 2 ranks"),
    ],
)
def test_requests_that_cannot_be(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
