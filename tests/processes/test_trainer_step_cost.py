"""Measures that make the trainer's step cheaper change nothing that it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from support.config_flags import train_arguments
from support.fork_server import run_forked
from support.small_run import make_data, small_config


def trained(out: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """The summary of a run."""
    config = small_config(out, data, steps=3, **changes)
    (finished,) = run_forked(["-m", "gradsync", *train_arguments(config)])
    finished.ok()
    return json.loads((out / "summary.json").read_text())


def test_keeping_memory_changes_no_bit(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    kept = trained(tmp_path / "kept", data)
    given_back = trained(tmp_path / "given-back", data, keep_memory=False)
    assert kept["weights_sha256"] == given_back["weights_sha256"]
    for name, expected in (("kept", True), ("given-back", False)):
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert config["keep_memory"] is expected
