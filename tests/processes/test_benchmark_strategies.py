"""One tiny round of the benchmark runs, and its record holds what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_table import rows

from support.launchers import run_python

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "strategies" / "run.py"
NUM_PARAMETERS = 11  # embedding, the last norm, and 9 of the one layer
TINY = ["--rounds", "1", "--steps", "2", "--width", "64", "--depth", "1", "--tokens", "16"]


def test_one_round_on_two_ranks(tmp_path: Path) -> None:
    """Bytes as the kernel counts them: W = 2, so a sum sends S and a gather S/2."""
    only = ["naive", "bucketed", "invariant", "bf16", "zero1", "ddp"]
    argv = [RUN, "--world-size", "2", *TINY, "--out", tmp_path, "--only", *only]
    done = run_python(argv, timeout_s=90).ok()
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["contestants"]) == ["none", *only]
    assert record["world_size"] == 2
    assert all(name in done.stdout for name in only)
    for found in record["contestants"].values():
        assert [len(rounds) for rounds in found["step_s"]] == [1, 1]
        assert all(len(steps) == 2 and min(steps) > 0 for [steps] in found["step_s"])
    size = record["gradient_bytes"]
    steps = 2
    sent = {n: sum(f["sent_bytes"]) / 2 / steps / size for n, f in record["contestants"].items()}
    expected = dict.fromkeys(only, 1.0) | {"none": 0.0, "bf16": 0.5, "zero1": 1.5}
    assert all(value <= sent[name] < value + 0.1 for name, value in expected.items()), sent
    held = {name: float(row.held) for name, row in rows(record).items()}
    assert all(4.0 <= held[name] < 4.3 for name in ("none", "naive", "bucketed", "invariant"))
    assert 3.0 <= held["zero1"] < 3.3  # half of AdamW's two states
    operations = {name: float(row.operations) for name, row in rows(record).items()}
    assert operations["none"] == 0
    assert operations["naive"] == NUM_PARAMETERS + 1
    assert operations["bucketed"] == operations["ddp"] == 2  # one bucket and the small message
    assert operations["invariant"] == 4  # two per bucket, who has which leaves, the small message
