"""Tables of measurements in the docs come from records, and from nowhere else."""

from __future__ import annotations

import json

import bench_tables
import benchmark_table
import pytest
from bench_tables import PAGES, ROOT, TABLE
from benchmark_table import PAGE, SECTION

from gradsync.commands.bench.experiment import show_progress
from gradsync.sync.registry import STRATEGIES


def test_the_pages_are_what_the_records_say() -> None:
    """Every kind of record is on some page; so the pages hold its table, digit by digit."""
    paths = [path for page in PAGES for path in TABLE.findall((ROOT / page).read_text("utf-8"))]
    kinds = {json.loads((ROOT / path).read_text("utf-8"))["benchmark"] for path in paths}
    assert kinds == {"sync", "collectives", "network"}
    assert bench_tables.main(["--check"]) == 0
    assert benchmark_table.main(["--check"]) == 0
    (path,) = SECTION.findall(PAGE.read_text("utf-8"))
    text = (ROOT / path).read_text("utf-8")
    assert list(json.loads(text)["contestants"]) == ["none", *STRATEGIES]
    assert "/home/" not in text
    assert str(ROOT) not in text


def test_each_tenth_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for place in range(70):
        show_progress(place, 70, f"times {place}")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert "0 of 70" in told[0]
    assert "63 of 70" in told[-1]
