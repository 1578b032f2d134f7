"""Faults drawn from a seed, and the table that the guide has of them."""

from __future__ import annotations

import json

from plant_faults import draw, table
from source_tree import REPOSITORY


def test_a_seed_draws_the_same_faults_again_and_each_can_come() -> None:
    kinds, ranks = ["kill", "disk-full", "partition"], [2, 3, 4]
    drawn = list(draw(30, 7, kinds, ranks))
    assert drawn == list(draw(30, 7, kinds, ranks)) != list(draw(30, 8, kinds, ranks))
    assert [plan.kind for plan, _, _ in drawn[:4]] == [*kinds, "kill"]
    assert all(plan.rank < world_size for plan, world_size, _ in drawn)
    assert {world_size for _, world_size, _ in drawn} == set(ranks)


def test_the_guides_table_is_made_of_the_records() -> None:
    records = sorted((REPOSITORY / "benchmarks" / "faults").glob("*/record.json"))
    faults = [each for path in records for each in json.loads(path.read_text("utf-8"))["faults"]]
    guide = (REPOSITORY / "docs" / "guide" / "when-it-hangs.md").read_text("utf-8")
    assert table(faults) in guide
    kept = sum(not each["broken"] for each in faults)
    assert f"{len(faults):,} faults drawn from seeds" in guide
    assert f"{kept:,} came as promised; the {len(faults) - kept} others" in guide
