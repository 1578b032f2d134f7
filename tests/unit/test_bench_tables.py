"""Tables of measurements come from records, and from nowhere else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from bench_tables import PAGES, ROOT, TABLE, main, render

from gradsync.bench.contestants import parse_contestants, with_ideals
from gradsync.bench.plan import SyncSettings, sync_plan
from gradsync.bench.simulation import simulation_plan

MACHINE = {"cpu": "Some CPU", "cores": 2, "torch": "2.13.0", "date": "2026-01-02"}
SPREAD = {"median": 1200.4, "low": 1100.0, "high": 1300.0, "count": 5}
RATIO = {"median": 1.0104, "low": 1.0, "high": 1.02, "count": 5}


def sync_record() -> str:
    def row(name: str, tokens_per_s: float, *, keep: bool) -> dict[str, object]:
        return {
            "contestant": name,
            "keep_memory": keep,
            "total_ms": SPREAD,
            "ratio": RATIO,
            "exposed_ms": 12.3,
            "tokens_per_s": tokens_per_s,
        }

    settings = SyncSettings(model_size="mini", rounds=5, num_steps=2)
    chosen = with_ideals(parse_contestants("invariant,torch_ddp"), same_allocator=False)
    plan = asdict(sync_plan(settings, chosen, world_size=2, batch_size=3))
    rows = [row("invariant", 1500.0, keep=True), row("torch_ddp", 1000.0, keep=False)]
    return json.dumps(
        {
            "benchmark": "sync",
            "command": "gradsync bench sync",
            "environment": MACHINE,
            "plan": plan,
            "rows": rows,
        }
    )


def collectives_record() -> str:
    def row(algorithm: str, size: int, seconds: float, part: float | None) -> dict[str, object]:
        limit = None if part is None else {"median": part, "low": part, "high": part}
        return {
            "operation": "all_reduce",
            "algorithm": algorithm,
            "size_bytes": size,
            "p50_s": seconds,
            "of_limit": limit,
        }

    rows = [
        row("gloo", 4096, 120e-6, None),
        row("shared", 4096, 8e-6, 0.1),
        row("shared", 25 * 2**20, 0.00215, 0.8),
        row("shared", 1536 * 2**10, 1e-3, 0.8),
        row("copy", 4096, 1e-6, None),
    ]
    return json.dumps(
        {
            "benchmark": "collectives",
            "command": "gradsync bench collectives",
            "environment": MACHINE,
            "rows": rows,
        }
    )


def simulation_record() -> str:
    settings = SyncSettings(model_size="mini", rounds=5, num_steps=2)
    plan = simulation_plan(settings, strategies="invariant", sizes=(1, 2), batch_size=1).plan
    row = {
        "strategy": "invariant",
        "world_size": 2,
        "predicted_ms": SPREAD,
        "measured_ms": SPREAD,
        "error": {"median": -0.0123, "low": -0.1, "high": 0.05, "count": 5},
        "error_from_one": 0.2,
    }
    return json.dumps(
        {
            "benchmark": "simulation",
            "command": "gradsync bench simulation",
            "environment": MACHINE,
            "plan": asdict(plan),
            "predictions": [row],
        }
    )


def page_of(record: str) -> str:
    page = "before\n<!-- bench: a.json -->\nold\n<!-- bench: end -->\nafter\n"
    return render(page, lambda _: record)


def test_a_line_per_contestant() -> None:
    page = page_of(sync_record())
    assert page.startswith("before\n<!-- bench: a.json -->\n| ")
    assert page.endswith("<!-- bench: end -->\nafter\n")
    assert (
        "| `invariant` | 1,200 (1,100-1,300) | 1.010 (1.000-1.020) | 12 | 1,500 | yes | 1.50 |"
        in page
    )
    assert "gradsync bench sync`: GPT mini (29.9 M parameters), bf16, 2 ranks x 3 x" in page
    assert "CPU, 2 cores (Some CPU)" in page


def test_a_line_per_size() -> None:
    page = page_of(collectives_record())
    assert "| all_reduce | `gloo` | `shared` | `shared` of the limit |" in page
    assert "| 4 KiB | 120 µs | 8 µs | 10% |" in page
    assert "| 25 MiB |  | 2.15 ms | 80% |" in page
    assert "| 1.5 MiB |  | 1.00 ms | 80% |" in page


def test_a_line_per_prediction() -> None:
    page = page_of(simulation_record())
    assert (
        "| `invariant` | 2 | 1,200 (1,100-1,300) | 1,200 (1,100-1,300) | -1.2% (-10.0% to +5.0%) "
        "| +20.0% |" in page
    )
    assert "bench simulation`: GPT mini (29.9 M parameters), bf16, sequences of 512; 5" in page


def test_check_finds_what_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(sync_record())
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    for name in PAGES:
        (tmp_path / name).write_text("<!-- bench: a.json -->\nold\n<!-- bench: end -->\n")
    assert main(["--check"], tmp_path) == 1
    assert "docs/figures.md" in capsys.readouterr().out
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0


def test_the_pages_are_what_the_records_say() -> None:
    assert TABLE.search((ROOT / "docs" / "figures.md").read_text(encoding="utf-8"))
    assert main(["--check"]) == 0
