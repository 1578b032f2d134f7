"""`gradsync train --elastic` from the command line to the run's own config.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.cli.main import main
from gradsync.commands.train import tuned
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import write_config
from gradsync.commands.train.tuned import resolve_dtype
from gradsync.world import World
from support.small_run import make_data, small_config
from support.thread_ranks import run_thread_ranks


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


def test_a_run_writes_down_what_was_found(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["train", str(config_file), "--elastic", "--nproc-per-node", "1"]
    monkeypatch.setattr("gradsync.commands.cli.train.host_cores", lambda: 0)
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "\n1 ranks share 0 cores: no faster than 0 ranks\n" in said
    run = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    found = run["micro_batch_size"]
    assert f"--micro-batch-size {found} " in said  # how to have the bits of this choice again
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
    assert document["plan"]["num_micro_batches"] == 2
    assert "elastic: " in err
    assert sorted(tmp_path.rglob("*")) == before


def test_ranks_agree_on_a_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 where all have it; a run that goes on keeps its own, which rank 0 alone can see."""
    monkeypatch.setattr(tuned, "fast_dtype", {"cpu": "fp32", "cuda:0": "bf16"}.__getitem__)

    def agreed(slow: int, out: Path) -> set[tuple[str, str]]:
        def one(rank: int, group: dist.ProcessGroup) -> tuple[str, str]:
            world = World(rank=rank, world_size=3, device_name="cpu" if rank == slow else "cuda:0")
            config = TrainConfig(out=str(out if rank == 0 else tmp_path / "elsewhere"))
            found, line = resolve_dtype(config, world, ProcessGroupCommunicator(group))
            return found.named_dtype, line

        return set(run_thread_ranks(one, 3))

    assert agreed(9, tmp_path) == {("bf16", "dtype auto: bf16, which is multiplied in hardware")}
    emulated = "dtype auto: fp32; bf16 would be emulated on rank(s) 1"
    assert agreed(1, tmp_path) == {("fp32", emulated)}
    begun = tmp_path / "run" / "config.yaml"
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_config(TrainConfig(dtype="bf16"), begun)
    assert agreed(1, tmp_path / "run") == {("bf16", f"dtype auto: bf16, as in {begun}")}
