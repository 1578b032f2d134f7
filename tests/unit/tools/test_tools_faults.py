"""Faults drawn from a seed, and the table that the guide has of them."""

from __future__ import annotations

import json

from plant_faults import table
from source_tree import REPOSITORY


def test_the_guides_table_is_made_of_the_records() -> None:
    records = sorted((REPOSITORY / "benchmarks" / "faults").glob("*/record.json"))
    faults = [each for path in records for each in json.loads(path.read_text("utf-8"))["faults"]]
    guide = (REPOSITORY / "docs" / "guide" / "when-it-hangs.md").read_text("utf-8")
    assert table(faults) in guide
    kept = sum(not each["broken"] for each in faults)
    assert f"{len(faults):,} faults drawn from seeds" in guide
    assert f"{kept:,} came as promised; the {len(faults) - kept} others" in guide
