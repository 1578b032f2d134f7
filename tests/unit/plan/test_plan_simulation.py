"""Larger machines by the closed form."""

from __future__ import annotations

import pytest

from gradsync.commands.plan.simulation import efficiency_table, simulate
from gradsync.commands.plan.step_costs import predict_step
from gradsync.errors import ConfigError
from support.planned_machines import FAR, hardware, profile, split, work


def test_thousands_of_ranks() -> None:
    host = hardware(4).hosts[0]
    splits = [split("ring"), split("hierarchical"), split("diloco"), split("ring", pp=8)]
    points = simulate(work(1), host, FAR, [16, 4, 4096], profile(), splits=splits)
    found = {(point.name, point.world_size): point for point in points}
    sizes = (4, 16, 4096)
    for name in ("ring", "hierarchical"):
        efficiencies = [found[name, size].efficiency for size in sizes]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert found["diloco", 4096].efficiency > 0.5 > found["ring", 4096].efficiency
    alone = predict_step(work(4), split("ring", dp=4), hardware(4), profile())
    assert found["ring", 4].step_s == alone.total_s
    lines = efficiency_table(points)
    assert lines[0].split() == ["efficiency", "4", "ranks", "16", "ranks", "4096", "ranks"]
    assert [line.split()[0] for line in lines[1:]] == ["ring", "hierarchical", "diloco", "ring"]
    assert len(lines[-1].split()) == 4  # eight stages do not divide 4 ranks
    with pytest.raises(ConfigError, match="2 hosts need a network"):
        simulate(work(1), host, None, [8], profile(), splits=splits)
