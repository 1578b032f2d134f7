"""Tables of measurements in the docs come from records, and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_a_changed_page_is_noticed_and_put_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    for name in PAGES:
        changed = (ROOT / name).read_text("utf-8").replace("| 4 KiB |", "| 4 KB |")
        (tmp_path / name).write_text(changed.replace("| strategy | step, ms |", "| strategy |"))
    monkeypatch.setattr("benchmark_table.PAGE", tmp_path / "docs" / "guide" / PAGE.name)
    before = (tmp_path / "docs" / "figures.md").read_text("utf-8")
    assert bench_tables.main(["--check"], tmp_path) == benchmark_table.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "docs/figures.md" in said
    assert f"{PAGE.name} is out of date" in said
    assert (tmp_path / "docs" / "figures.md").read_text("utf-8") == before
    assert bench_tables.main([], tmp_path) == benchmark_table.main([]) == 0
    for name in PAGES:
        assert (tmp_path / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")


def contestant(step_s: list[list[list[float]]], **others: Any) -> dict[str, Any]:
    """Two ranks; `step_s` is [rank][round][step]."""
    return {
        **{"promise": None, "options": {}, "step_s": step_s, "held_bytes": [400, 400]},
        "exposed_s": [[[0.0 for _ in steps] for steps in rounds] for rounds in step_s],
        **{"sent_bytes": [0, 0], "operations": [0, 0]},
        **others,
    }


@pytest.fixture
def record() -> dict[str, Any]:
    """Three rounds of two steps on two ranks, 100 bytes of gradients."""
    alone = [[0.1, 0.1], [0.2, 0.2], [0.1, 0.3]]
    slow = [[0.1, 0.3], [0.4, 0.4], [0.3, 0.2]]
    naive = contestant(
        [alone, slow],
        options={"k": 8},
        exposed_s=[[[0.01, 0.03]] * 3, [[0.02, 0.02]] * 3],
        **{"sent_bytes": [600, 600], "operations": [9, 9], "held_bytes": [300, 400]},
    )
    return {
        "gradient_bytes": 100,
        "contestants": {"none": contestant([alone, alone]), "naive": naive},
    }


def test_figures(record: dict[str, Any]) -> None:
    """Turns of `none` are 0.1, 0.2, 0.2 s, those of `naive` 0.2, 0.4, 0.25 s: ratios of the same
    round are 2, 2, 1.25, which no ratio of medians would give."""
    none, row = benchmark_table.rows(record).values()
    assert row.step_ms == "250.0 (225.0-325.0)"
    assert row.ratio == "2.00 (1.62-2.00)"
    assert row.exposed_ms == "20.0"
    assert (row.sent, row.operations, row.held) == ("1.00", "1.5", "3.50")
    assert none.ratio == "1"


def test_each_tenth_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for place in range(70):
        show_progress(place, 70, f"times {place}")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert "0 of 70" in told[0]
    assert "63 of 70" in told[-1]
