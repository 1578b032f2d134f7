"""The table of a benchmark: its arithmetic, and the page that carries it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_table import PAGE, ROOT, SECTION, main, render, rows, table

from gradsync.sync.registry import STRATEGIES


def contestant(step_s: list[list[list[float]]], **others: Any) -> dict[str, Any]:
    """Two ranks; `step_s` is [rank][round][step]."""
    return {
        "promise": None,
        "options": {},
        "step_s": step_s,
        "exposed_s": [[[0.0 for _ in steps] for steps in rounds] for rounds in step_s],
        "sent_bytes": [0, 0],
        "operations": [0, 0],
        "held_bytes": [400, 400],
        **others,
    }


@pytest.fixture
def record() -> dict[str, Any]:
    """Three rounds of two steps on two ranks, 100 bytes of gradients."""
    alone = [[0.1, 0.1], [0.2, 0.2], [0.1, 0.3]]
    slow = [[0.1, 0.3], [0.4, 0.4], [0.3, 0.2]]
    return {
        "environment": {
            **{"date": "2026-01-02", "cpu": "a processor", "cores": 2, "load_at_start": 0.5},
            **{"threads_per_rank": 1, "torch": "9.9", "backend": "gloo"},
        },
        "command": "python benchmarks/strategies/run.py --world-size 2",
        "world_size": 2,
        "settings": {
            **{"width": 64, "depth": 2, "sequences": 2, "tokens": 16, "rounds": 3, "steps": 2},
            **{"bucket_mb": 1.0},
        },
        "gradient_bytes": 100,
        "contestants": {
            "none": contestant([alone, alone]),
            "naive": contestant(
                [alone, slow],
                options={"k": 8},
                exposed_s=[[[0.01, 0.03]] * 3, [[0.02, 0.02]] * 3],
                sent_bytes=[600, 600],
                operations=[9, 9],
                held_bytes=[300, 400],
            ),
        },
    }


def test_figures(record: dict[str, Any]) -> None:
    """Turns of `none` are 0.1, 0.2, 0.2 s, those of `naive` 0.2, 0.4, 0.25 s: ratios of the same
    round are 2, 2, 1.25, which no ratio of medians would give."""
    row = rows(record)["naive"]
    assert row.step_ms == "250.0 (225.0-325.0)"
    assert row.ratio == "2.00 (1.62-2.00)"
    assert row.exposed_ms == "20.0"
    assert (row.sent, row.operations, row.held) == ("1.00", "1.5", "3.50")
    assert rows(record)["none"].ratio == "1"


def test_the_table_says_where_and_how(record: dict[str, Any]) -> None:
    text = table(record)
    assert "| `naive` (k=8) | 250.0 (225.0-325.0) | 2.00 (1.62-2.00) | 20.0 | 1.00 | 1.5 |" in text
    for said in ("2026-01-02, a processor, 2 cores (load 0.5", "torch 9.9", "2 ranks of 1 thread"):
        assert said in text
    assert f"\n    {record['command']}" in text


def test_render_replaces_table_and_lines(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text(json.dumps(record))
    page = (
        "before\n<!-- measured: naive -->\nold line\nbetween\n"
        "<!-- benchmark: old.json -->\nold table\n<!-- benchmark: end -->\nafter\n"
    )
    after = render(page, tmp_path, "new.json")
    assert "old line" not in after
    assert "old table" not in after
    assert after.startswith("before\n<!-- measured: naive -->\n*Measured* (k=8): a step takes 2.00")
    assert "\nbetween\n<!-- benchmark: new.json -->\n\n| strategy |" in after
    assert after.endswith("<!-- benchmark: end -->\nafter\n")
    assert render(after, tmp_path) == after
    with pytest.raises(ValueError, match="no strategy 'other'"):
        render(page.replace("measured: naive", "measured: other"), tmp_path, "new.json")
    with pytest.raises(ValueError, match="one benchmark section, it has 0"):
        render("no section", tmp_path, "new.json")


def test_the_page_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_a_changed_page_is_noticed_and_put_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    changed = PAGE.read_text().replace("| strategy | step, ms |", "| strategy | step, s |")
    page.write_text(changed)
    monkeypatch.setattr("benchmark_table.PAGE", page)
    assert main(["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().out
    assert page.read_text() == changed
    assert main([]) == 0
    assert page.read_text() == (ROOT / "docs" / "guide" / "strategies.md").read_text()


def test_the_record_has_every_strategy_and_no_machine_path() -> None:
    found = SECTION.findall(PAGE.read_text())
    text = (ROOT / found[0]).read_text()
    assert list(json.loads(text)["contestants"]) == ["none", *STRATEGIES]
    assert "/home/" not in text
    assert str(ROOT) not in text
