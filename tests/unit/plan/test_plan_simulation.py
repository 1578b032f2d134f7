"""Larger machines by the closed form, and what is said of them."""

from __future__ import annotations

import json

import pytest

from gradsync.commands.plan.simulation import Simulation, report_text, simulate
from gradsync.commands.plan.step_costs import predict_step
from gradsync.errors import ConfigError
from support.planned_machines import FAR, hardware, profile, split, work


def simulated() -> Simulation:
    host = hardware(4).hosts[0]
    return simulate(
        *(work(1), host, FAR, [16, 4, 4096], profile()),
        splits=[split("ring"), split("hierarchical"), split("diloco"), split("ring", pp=8)],
    )


def test_thousands_of_ranks() -> None:
    found = simulated()
    assert found.world_sizes == (4, 16, 4096)
    assert found.names == ["ring", "hierarchical", "diloco", "ring pp=8"]
    assert found.point("ring pp=8", 4) is None
    for name in ("ring", "hierarchical"):
        efficiencies = [p.efficiency for p in found.points if p.name == name]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert found.point("diloco", 4096).efficiency > 0.5 > found.point("ring", 4096).efficiency
    alone = predict_step(work(4), split("ring", dp=4), hardware(4), profile())
    assert found.point("ring", 4).step_s == alone.total_s


def test_for_readers() -> None:
    found = simulated()
    text = report_text(found)
    lines = text.splitlines()
    assert lines[0].split() == ["efficiency", "4", "ranks", "16", "ranks", "4096", "ranks"]
    assert lines[1].startswith("ring  ")
    assert "between hosts far: 0.0001 GB/s a rank" in text
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
