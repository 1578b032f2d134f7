"""Tables of measurements in the docs come from records, and from nowhere else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_tables
import benchmark_table
import pytest
from bench_tables import PAGES, ROOT, TABLE
from benchmark_table import PAGE, SECTION

from gradsync.bench import simulation
from gradsync.bench.contestants import parse_contestants, with_ideals
from gradsync.bench.memory import MemoryCase, row_of
from gradsync.bench.plan import SyncSettings, sync_plan
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

MACHINE = {"cpu": "Some CPU", "cores": 2, "torch": "2.13.0", "date": "2026-01-02", "world_size": 2}
SPREAD = {"median": 1200.4, "low": 1100.0, "high": 1300.0, "count": 5}
CASE = MemoryCase(shape="long", strategy="zero1", checkpointing=True, leaves=3)


def sync_record() -> dict[str, Any]:
    settings = SyncSettings(model_size="mini", rounds=5, num_steps=2)
    chosen = with_ideals(parse_contestants("invariant,torch_ddp"), same_allocator=False)
    common = {
        "total_ms": SPREAD,
        "ratio": {"median": 1.0104, "low": 1.0, "high": 1.02, "count": 5},
        "exposed_ms": 12.3,
    }
    rows = [("invariant", True, 1500.0), ("torch_ddp", False, 1000.0)]
    return {
        "plan": asdict(sync_plan(settings, chosen, world_size=2, batch_size=3)),
        "rows": [
            {**common, "contestant": name, "keep_memory": keep, "tokens_per_s": tokens}
            for name, keep, tokens in rows
        ],
    }


def collectives_record() -> dict[str, Any]:
    rows = [
        ("gloo", 4096, 120e-6, None),
        ("shared", 4096, 8e-6, 0.1),
        ("shared", 25 * 2**20, 0.00215, 0.8),
        ("shared", 1536 * 2**10, 1e-3, 0.8),
        ("copy", 4096, 1e-6, None),
    ]
    return {
        "rows": [
            {
                **{"operation": "all_reduce", "algorithm": name, "size_bytes": size, "p50_s": p50},
                "of_limit": None
                if part is None
                else dict.fromkeys(("median", "low", "high"), part),
            }
            for name, size, p50, part in rows
        ]
    }


def simulation_record() -> dict[str, Any]:
    options = simulation.SimulationOptions(
        model_size="mini", rounds=5, strategies="invariant", world_sizes="2"
    )
    row = {
        **{"strategy": "invariant", "world_size": 2, "predicted_ms": SPREAD, "measured_ms": SPREAD},
        "error": {"median": -0.0123, "low": -0.1, "high": 0.05, "count": 5},
        "error_from_one": 0.2,
    }
    return {"plan": asdict(simulation.plan_of(options, World()).plan), "predictions": [row]}


def memory_record() -> dict[str, Any]:
    result = {"kind": "cpu", "keeps_memory": True, "peak_bytes": [2**30, 2**29]}
    return {"rows": [asdict(row_of(CASE, result))]}


def memory_line() -> str:
    need = CASE.need(2, "cpu").total
    return f"{need / 2**20:,.0f} | 1,024 | {need / 2**30:.2f} |"


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        (
            "sync",
            sync_record,
            [
                "| `invariant` | 1,200 (1,100-1,300) | 1.010 (1.000-1.020) | 12 | 1,500 | yes "
                "| 1.50 |",
                "gradsync bench sync`: GPT mini (29.9 M parameters), bf16, 2 ranks x 3 x",
                "CPU, 2 cores (Some CPU)",
            ],
        ),
        (
            "collectives",
            collectives_record,
            [
                "| all_reduce | `gloo` | `shared` | `shared` of the limit |",
                "| 4 KiB | 120 µs | 8 µs | 10% |",
                "| 25 MiB |  | 2.15 ms | 80% |",
                "| 1.5 MiB |  | 1.00 ms | 80% |",
            ],
        ),
        (
            "simulation",
            simulation_record,
            [
                "| `invariant` | 2 | 1,200 (1,100-1,300) | 1,200 (1,100-1,300) | -1.2% (-10.0% to "
                "+5.0%) | +20.0% |",
                "bench simulation`: GPT mini (29.9 M parameters), bf16, sequences of 512; 5",
            ],
        ),
        (
            "memory",
            memory_record,
            [
                f"| `zero1`, checkpointing, 3 leaves | {memory_line()}",
                "`gradsync bench memory`: largest size of a rank of 2; long: 13.8 M parameters",
            ],
        ),
    ],
)
def test_a_table_of_a_record(name: str, record: Any, expected: list[str]) -> None:
    head = {"benchmark": name, "command": f"gradsync bench {name}", "environment": MACHINE}
    text = json.dumps(head | record())
    page = "before\n<!-- bench: a.json -->\nold\n<!-- bench: end -->\nafter\n"
    found = bench_tables.render(page, lambda _: text)
    assert found.startswith("before\n<!-- bench: a.json -->\n| ")
    assert found.endswith("<!-- bench: end -->\nafter\n")
    assert all(each in found for each in expected), found


def test_check_finds_what_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = {"benchmark": "sync", "command": "gradsync bench sync", "environment": MACHINE}
    (tmp_path / "a.json").write_text(json.dumps(head | sync_record()))
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    for name in PAGES:
        (tmp_path / name).write_text("<!-- bench: a.json -->\nold\n<!-- bench: end -->\n")
    assert bench_tables.main(["--check"], tmp_path) == 1
    assert "docs/figures.md" in capsys.readouterr().out
    assert bench_tables.main([], tmp_path) == 0
    assert bench_tables.main(["--check"], tmp_path) == 0


def test_the_pages_are_what_the_records_say() -> None:
    assert TABLE.search((ROOT / "docs" / "figures.md").read_text(encoding="utf-8"))
    assert bench_tables.main(["--check"]) == 0
    assert benchmark_table.main(["--check"]) == 0


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
    row = benchmark_table.rows(record)["naive"]
    assert row.step_ms == "250.0 (225.0-325.0)"
    assert row.ratio == "2.00 (1.62-2.00)"
    assert row.exposed_ms == "20.0"
    assert (row.sent, row.operations, row.held) == ("1.00", "1.5", "3.50")
    assert benchmark_table.rows(record)["none"].ratio == "1"


def test_the_table_says_where_and_how(record: dict[str, Any]) -> None:
    text = benchmark_table.table(record)
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
    after = benchmark_table.render(page, tmp_path, "new.json")
    assert "old line" not in after
    assert "old table" not in after
    assert after.startswith("before\n<!-- measured: naive -->\n*Measured* (k=8): a step takes 2.00")
    assert "\nbetween\n<!-- benchmark: new.json -->\n\n| strategy |" in after
    assert after.endswith("<!-- benchmark: end -->\nafter\n")
    assert benchmark_table.render(after, tmp_path) == after
    with pytest.raises(ValueError, match="no strategy 'other'"):
        benchmark_table.render(
            page.replace("measured: naive", "measured: other"), tmp_path, "new.json"
        )
    with pytest.raises(ValueError, match="one benchmark section, it has 0"):
        benchmark_table.render("no section", tmp_path, "new.json")


def test_a_changed_page_is_noticed_and_put_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    changed = PAGE.read_text().replace("| strategy | step, ms |", "| strategy | step, s |")
    page.write_text(changed)
    monkeypatch.setattr("benchmark_table.PAGE", page)
    assert benchmark_table.main(["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().out
    assert page.read_text() == changed
    assert benchmark_table.main([]) == 0
    assert page.read_text() == (ROOT / "docs" / "guide" / "strategies.md").read_text()


def test_the_record_has_every_strategy_and_no_machine_path() -> None:
    found = SECTION.findall(PAGE.read_text())
    text = (ROOT / found[0]).read_text()
    assert list(json.loads(text)["contestants"]) == ["none", *STRATEGIES]
    assert "/home/" not in text
    assert str(ROOT) not in text
