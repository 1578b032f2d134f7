"""One tiny round of the benchmark, and its record holds what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_table import rows

from support.rank_session import open_session

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "strategies"
ONLY = ["bucketed", "bf16", "zero1", "ddp"]
STEPS = 2
TINY = ["--rounds", "1", "--steps", str(STEPS), "--width", "64", "--depth", "1", "--tokens", "16"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the ranks of the pool."""
    monkeypatch.syspath_prepend(FOLDER)


def _measured(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    from run import parse, record_of

    with open_session(rank, world_size, store_path) as world:
        return record_of(parse([*TINY, "--only", *ONLY]), world)


def test_one_round_on_two_ranks(
    pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes as the kernel counts them: W = 2, so a sum sends S, and `zero1` as much in all."""
    from run import show

    show(pool.run(_measured, 2)[0], tmp_path)
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["contestants"]) == ["none", *ONLY]
    assert record["world_size"] == 2
    assert record["command"].endswith(f"--bucket-mb 1.0 --only {' '.join(ONLY)}")
    assert all(name in printed for name in ONLY)
    for found in record["contestants"].values():
        assert [len(rounds) for rounds in found["step_s"]] == [1, 1]
        assert all(len(steps) == STEPS and min(steps) > 0 for [steps] in found["step_s"])
    size = record["gradient_bytes"]
    sent = {n: sum(f["sent_bytes"]) / 2 / STEPS / size for n, f in record["contestants"].items()}
    expected = dict.fromkeys(ONLY, 1.0) | {"none": 0.0, "bf16": 0.5}
    assert all(value <= sent[name] < value + 0.1 for name, value in expected.items()), sent
    held = {name: float(row.held) for name, row in rows(record).items()}
    assert 4.0 <= held["none"] < 4.3
    assert 3.5 <= held["zero1"] < 3.8  # half of AdamW's two states, and the same
    operations = {name: float(row.operations) for name, row in rows(record).items()}
    assert operations["none"] == 0
    assert operations["bucketed"] == operations["ddp"] == 2  # one bucket and the small message
