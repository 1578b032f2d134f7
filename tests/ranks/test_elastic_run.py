"""`gradsync train --elastic` from the command line to the run's own config.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gradsync.cli.main import main
from gradsync.train.config_io import write_config
from support.small_run import make_data, small_config


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything but the micro-batch is said."""
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    data = make_data(tmp_path / "data")
    config = small_config(tmp_path / "run", data, steps=2, keep_memory=False, tokens_per_update=32)
    path = tmp_path / "small.yaml"
    write_config(config, path)
    values = yaml.safe_load(path.read_text())
    del values["micro_batch_size"]
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_run_writes_down_what_was_found(config_file: Path, tmp_path: Path) -> None:
    line = ["train", str(config_file), "--elastic", "--nproc-per-node", "1"]
    assert main(line) == 0
    run = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    found = run["micro_batch_size"]
    (kept,) = (tmp_path / "cache" / "micro-batch").iterdir()
    assert json.loads(kept.read_text())["size"] == found
    assert (run["sync"], run["dtype"]) == ("invariant", "fp32")
    # It goes on with the same leaf, whatever the cache says by now.
    kept.unlink()
    assert main([*line, "--steps", "3"]) == 0
    assert not kept.exists()
    again = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (again["micro_batch_size"], again["steps"]) == (found, 3)


def test_a_dry_run_shows_it_and_writes_nothing(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    line = ["train", str(config_file), "--elastic_gpu", "--nproc-per-node", "2", "--dry-run"]
    assert main([*line, "--json", "--micro-batch-size", "1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["config"]["nproc_per_node"] == 2
    assert document["plan"]["num_leaves"] == 2
    assert "elastic: " in err
    assert sorted(tmp_path.rglob("*")) == before
