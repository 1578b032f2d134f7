"""`gradsync train --elastic` from the command line to the run's own config.yaml."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.cli.main import main
from gradsync.commands.cli.train import _with_all_ranks
from gradsync.commands.train import tuned
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import parse_config, write_config
from gradsync.commands.train.tuned import resolve_dtype
from gradsync.world import World
from support.small_run import make_data, small_config
from support.thread_ranks import run_thread_ranks


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Everything but the micro-batch is said."""
    config = small_config(tmp_path / "run", make_data(tmp_path / "data"), steps=2)
    path = tmp_path / "small.yaml"
    write_config(config, path)
    values = yaml.safe_load(path.read_text())
    del values["micro_batch_size"]
    path.write_text(yaml.safe_dump(values))
    return path


def written(tmp_path: Path) -> dict[str, Any]:
    return yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


def test_a_run_writes_down_what_was_found_and_keeps_it(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train", str(config_file), "--elastic", "--nproc-per-node", "1"]
    assert main(line) == 0
    found = written(tmp_path)
    assert found["sync"] == "invariant"
    assert main([*line, "--steps", "3"]) == 0
    assert "goes on as it began in " in capsys.readouterr().err
    assert written(tmp_path) == found | {"steps": 3}
    other = 1 if found["micro_batch_size"] == 2 else 2
    config_file.write_text(f"{config_file.read_text()}\nmicro_batch_size: {other}\n")
    assert main([*line, "--steps", "4"]) == 2, "what is given changes bits"
    assert "leaf_shape" in capsys.readouterr().err


def test_a_dry_run_shows_it_and_writes_nothing(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    line = ["train", str(config_file), "--elastic_gpu", "--nproc-per-node", "2", "--dry-run"]
    assert main([*line, "--json", "--micro-batch-size", "1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["config"]["nproc_per_node"] == 2
    assert "elastic: " in err
    assert sorted(tmp_path.rglob("*")) == before


def test_ranks_of_a_launcher_take_what_rank_0_chose(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    monkeypatch.setattr("gradsync.comm.groups.communicator", lambda _: here.comm)
    config = replace(parse_config([str(config_file)]), micro_batch_size=16)  # too large for two

    def one(rank: int, group: dist.ProcessGroup) -> tuple[TrainConfig, list[str]]:
        here.comm = ProcessGroupCommunicator(group)
        world = World(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launcher="env")
        found, lines = _with_all_ranks(config, frozenset({"sync"}), world, threads=1)
        return found, list(lines)

    (first, lines), (second, _) = run_thread_ranks(one, 2)
    assert first == second
    assert first.micro_batch_size < 16
    assert lines[-1].startswith("elastic: invariant dp=2, micro-batch ")


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
