"""Real ranks: `bench simulation` measures, predicts and writes its record."""

from __future__ import annotations

import json
from pathlib import Path

from support.launchers import run_python

QUICK = [
    *("--world-sizes", "2", "--strategies", "bucketed", "--context-length", "8"),
    *("--rounds", "2", "--num-steps", "1", "--seconds-per-point", "0"),
]


def test_predicted_beside_measured(tmp_path: Path) -> None:
    words = ["-m", "gradsync", "bench", "simulation", *QUICK, "--json", "--out", tmp_path]
    done = run_python(words, timeout_s=110).ok()
    document = json.loads(done.stdout)
    (found,) = document["predictions"]
    assert (found["strategy"], found["world_size"]) == ("bucketed", 2)
    for name in ("predicted_ms", "measured_ms"):
        assert found[name]["count"] == 2
        assert 0 < found[name]["low"] <= found[name]["high"] < 10_000
    parts = ("compute_ms", "update_ms", "communication_ms")
    assert abs(sum(found[part] for part in parts) - found["predicted_ms"]["median"]) < 1e-6
    lines = {(fit["operation"], fit["algorithm"]) for fit in document["fits"]["2"]}
    assert {("reduce_scatter", "shared"), ("all_reduce", "backend"), ("copy", "copy")} <= lines
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["benchmark"] == "simulation"
    assert record["predictions"] == document["predictions"]
    labels = [sorted(measured) for measured in record["samples"]]
    assert labels == [["bucketed, 1 rank", "none, 1 rank"], ["bucketed, 2 ranks", "none, 2 ranks"]]
