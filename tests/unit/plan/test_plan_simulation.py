"""The simulation against closed forms, and what it says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest

from gradsync.errors import ConfigError
from gradsync.plan.simulation import (
    Simulation,
    Stragglers,
    crossovers,
    order_of,
    report_text,
    simulate,
    step_s,
)
from gradsync.plan.step_costs import Sending, predict_step, step_costs
from gradsync.plan.workload import Split
from gradsync.sync.registry import STRATEGIES
from support.planned_machines import FAR, hardware, profile, split, work

JITTER = (0.9, 1.0, 1.1, 1.4)
SPLITS = [
    *(split(name, dp=4) for name in STRATEGIES),
    split("bucketed", pp=2),
    split("bucketed", pp=4, dp=2),
    split("ring", tp=2, dp=2),
    split("zero1", pp=2, tp=2, dp=2),
]


def even() -> Stragglers:
    return Stragglers((1.0,), random.Random(0))


@pytest.mark.parametrize("case", SPLITS, ids=str)
@pytest.mark.parametrize("leaves", [1, 3])
def test_even_ranks_take_the_closed_form(case: Split, leaves: int) -> None:
    machines = hardware(case.world_size, per_host=2)
    asked = work(leaves * case.layout.dp)
    if case.layout.pp > 1:  # hops stall 1F1B's steady state
        machines = replace(machines, hosts=hardware(case.world_size).hosts, network=None)
        free = replace(machines.hosts[0].link, alpha_s=0.0, bytes_per_s=1e30)
        machines = replace(machines, hosts=(replace(machines.hosts[0], link=free),))
    costs = step_costs(asked, case, machines, profile())
    even_s = predict_step(asked, case, machines, profile()).total_s
    assert step_s(costs, even()) == pytest.approx(even_s)


def test_hidden_buckets_take_the_closed_form() -> None:
    small = {"bucket_mb": 1e-9, "first_bucket_mb": 1e-9}
    about = (work(8), split("ring", dp=4), hardware(4), profile())
    costs = step_costs(*about, options=small)
    assert len(costs.sendings) > 10
    assert step_s(costs, even()) == pytest.approx(predict_step(*about, options=small).total_s)


@pytest.mark.parametrize("leaves", [1, 5])
def test_the_slowest_rank_decides(leaves: int) -> None:
    """Mean of the maximum over ranks of a sum over leaves, by plain drawing."""
    rng = random.Random(1)
    plain = fmean(
        max(sum(rng.choice(JITTER) for _ in range(leaves)) for _ in range(8)) for _ in range(4000)
    )
    stragglers = Stragglers(JITTER, random.Random(2))
    found = fmean(max(map(sum, stragglers.latest(8, leaves))) for _ in range(4000))
    assert found == pytest.approx(plain, rel=0.01)


class TwoRanks(Stragglers):
    """One slow in its last leaf, one behind from before."""

    def latest(self, ranks: int, leaves: int) -> list[tuple[float, float]]:
        """(ratios before, ratio of the last leaf)."""
        return [(0.0, 2.0), (3.0, 1.0)]


def test_a_bucket_waits_for_the_last_rank_and_for_the_channel() -> None:
    """Backwards begin at 0.2 and at 1.0, and take 0.4 and 0.2. The first bucket is full at 0.4 and
    at 1.1, the second one at 0.6 and at 1.2, when the first is under way until 2.1."""
    plain = step_costs(work(4), split("bucketed", dp=2), hardware(2), profile())
    buckets = (Sending(ready_s=0.1, cost_s=1.0), Sending(ready_s=0.2, cost_s=0.5))
    costs = replace(plain, sendings=buckets, agree_s=0.0, copy_s=0.0)
    ranks = TwoRanks((1.0,), random.Random(0))
    assert step_s(costs, ranks) == pytest.approx(2.6 + 0.03)
    # After backward: both are full at 1.2.
    assert step_s(replace(costs, hides=False), ranks) == pytest.approx(2.7 + 0.03)


def test_only_those_behind_in_something_count() -> None:
    latest = Stragglers([1 + k / 100 for k in range(50)], random.Random(0)).latest(4096, 4)
    assert 1 <= len(latest) < 40
    befores, lasts = zip(*latest, strict=True)
    assert list(lasts) == sorted(lasts, reverse=True)
    assert list(befores) == sorted(befores)


def test_shards_of_a_leaf_wait_for_each_other() -> None:
    pair = Stragglers((1.0, 2.0), random.Random(0), together=2)
    assert fmean(pair.slowest() for _ in range(4000)) == pytest.approx(1.75, rel=0.02)
    assert fmean(pair.total(100) for _ in range(400)) == pytest.approx(175, rel=0.01)


def test_more_ranks_wait_longer() -> None:
    def seconds(ranks: int) -> float:
        costs = step_costs(work(ranks), split("bucketed", dp=ranks), hardware(ranks), profile())
        stragglers = Stragglers(JITTER, random.Random(0))
        return fmean(step_s(costs, stragglers) for _ in range(200))

    times = [seconds(ranks) for ranks in (1, 2, 4, 8)]
    assert times == sorted(times)
    # One rank draws every ratio alike; of many, one always draws the greatest.
    assert times[0] == pytest.approx(fmean(JITTER) * 0.3 + 0.03, rel=0.02)
    assert times[-1] > 1.3 * 0.3 + 0.03


@pytest.mark.parametrize(("stage", "order"), [(0, "f0f1f2b0f3b1b2b3"), (2, "f0b0f1b1f2b2f3b3")])
def test_orders_of_a_pipeline(stage: int, order: str) -> None:
    assert "".join(f"{kind[0]}{leaf}" for kind, leaf in order_of(stage, 3, 4)) == order


def test_crossover_points_in_words() -> None:
    table = {
        "ring": {8: 0.9, 16: 0.8, 32: 0.3, 64: 0.2},
        "levels": {8: 0.85, 16: 0.8, 32: 0.7, 64: 0.45},
        "flat": {8: 0.9, 16: 0.9, 32: 0.9, 64: 0.4},
        "rare": {8: 0.95, 16: 0.95, 32: 0.95, 64: 0.95},
    }
    sizes = [8, 16, 32, 64]
    found = crossovers(
        list(table), ["rare"], sizes, lambda name, n: table[name][n], over="wan-1g-50ms"
    )
    assert found == [
        "from 32 ranks on, levels beats ring",
        "from 64 ranks on, levels beats flat",
        "from 32 ranks on, ring is below 50 %",
        "from 64 ranks on, levels and flat are below 50 %",
        "on 64 ranks over wan-1g-50ms, only rare stays above 50 %",
    ]
    alive = crossovers(["rare"], [], sizes, lambda name, n: table[name][n], over="x")
    assert alive == ["on 64 ranks over x, all stay above 50 %"]


def simulated(seed: int = 0, steps: int = 3) -> Simulation:
    host = hardware(4).hosts[0]
    return simulate(
        *(work(1), host, FAR, [16, 4, 4096], profile(JITTER)),
        splits=[split("ring"), split("hierarchical"), split("diloco"), split("ring", pp=8)],
        steps=steps,
        seed=seed,
    )


def test_thousands_of_ranks() -> None:
    found = simulated()
    assert found == simulated()  # a seed names a simulation
    assert found != simulated(seed=1)
    assert found.world_sizes == (4, 16, 4096)
    assert found.names == ["ring", "hierarchical", "diloco", "ring pp=8"]
    assert found.point("ring pp=8", 4) is None
    for name in ("ring", "hierarchical"):
        efficiencies = [p.efficiency for p in found.points if p.name == name]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert found.point("diloco", 4096).efficiency > 0.5 > found.point("ring", 4096).efficiency
    for point in found.points:
        assert point.step_s >= point.even_step_s * min(JITTER)
    assert any("diloco" in line and "above 50 %" in line for line in found.crossovers)


def test_for_readers() -> None:
    found = simulated()
    text = report_text(found)
    lines = text.splitlines()
    assert lines[0].split() == ["efficiency", "4", "ranks", "16", "ranks", "4096", "ranks"]
    assert lines[1].startswith("ring  ")
    assert "between hosts far: 0.0001 GB/s a rank" in text
    assert all(f"- {line}" in lines for line in found.crossovers)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [p["world_size"] for p in document["points"][:3]] == [4, 16, 4096]
    assert document["network"]["name"] == "far"


def test_refusals() -> None:
    """Refusals of the command line itself are in `test_plan_command.py`."""
    host, pipeline = hardware(4).hosts[0], [split("bucketed", pp=2)]
    with pytest.raises(ConfigError, match="2 hosts, but no network between them"):
        simulate(work(1), host, None, [8], profile(), splits=pipeline)
    with pytest.raises(ConfigError, match="bucketed pp=2: needs a multiple of 2 ranks; got 3"):
        simulate(work(1), host, None, [3], profile(), splits=pipeline)
