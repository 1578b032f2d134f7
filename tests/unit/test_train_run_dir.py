"""What a run leaves behind, also after it was killed and went on."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.errors import ConfigError, RunError
from gradsync.train.config import recipe
from gradsync.train.config_io import parse_config
from gradsync.train.output import RunDir, default_out, describe_environment
from gradsync.world import World

CONFIG = recipe("tiny")
WORLD = World(rank=0, world_size=4, local_world_size=2, num_nodes=2, launcher="srun")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def begin(path: Path, *, done_steps: int = 0) -> RunDir:
    run_dir = RunDir(path)
    run_dir.begin(CONFIG, WORLD, threads=3, done_steps=done_steps)
    return run_dir


def steps(path: Path) -> list[int]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_nothing_is_made_before_it_is_needed(path: Path) -> None:
    run_dir = RunDir(path)
    run_dir.refuse_overwrite()
    run_dir.log_metrics({"step": 1})  # not begun: nowhere to write
    run_dir.close()
    assert not path.exists()
    assert run_dir.checkpoints == path / "checkpoints"


def test_the_beginning_is_written_down(path: Path) -> None:
    begin(path).close()
    assert sorted(entry.name for entry in path.iterdir()) == [
        "config.yaml",
        "env.json",
        "metrics.jsonl",
    ]
    assert parse_config([str(path / "config.yaml")]) == CONFIG
    assert json.loads((path / "env.json").read_text()) == describe_environment(WORLD, 3)
    assert (path / "metrics.jsonl").read_text() == ""


def test_the_environment_says_who_computes_with_what() -> None:
    described = describe_environment(replace(WORLD, device="cuda:1"), 3)
    assert described["launcher"] == "srun"
    assert described["world_size"] == 4
    assert described["num_nodes"] == 2
    assert described["device"] == "cuda:1"
    assert described["threads"] == 3
    assert {"host", "platform", "python", "torch", "gradsync", "argv", "cores"} <= set(described)


def test_metrics_are_there_at_once(path: Path) -> None:
    run_dir = begin(path)
    run_dir.log_metrics({"step": 1, "train/loss": 2.5, "optim/grad_norm": None})
    text = (path / "metrics.jsonl").read_text()  # before the file is closed
    assert text == '{"step": 1, "train/loss": 2.5, "optim/grad_norm": null}\n'
    run_dir.log_metrics({"step": 2})
    run_dir.close()
    assert steps(path) == [1, 2]


def test_closing_twice(path: Path) -> None:
    run_dir = begin(path)
    run_dir.close()
    run_dir.close()
    run_dir.log_metrics({"step": 1})
    assert steps(path) == []


def test_steps_done_again_are_dropped(path: Path) -> None:
    run_dir = begin(path)
    for step in (1, 2, 2, 3, 4):  # step 2 has a line for its evaluation
        run_dir.log_metrics({"step": step})
    run_dir.close()
    resumed = begin(path, done_steps=2)
    resumed.log_metrics({"step": 3})
    resumed.close()
    assert steps(path) == [1, 2, 2, 3]


@pytest.mark.parametrize(
    "torn", ['{"step": 1', "", "null", '{"loss": 1.0}', '{"step": "x"}', "[1]"]
)
def test_a_torn_line_is_dropped(path: Path, torn: str) -> None:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{torn}')
    resumed = begin(path, done_steps=5)
    resumed.log_metrics({"step": 6})
    resumed.close()
    assert steps(path) == [1, 6]


def test_a_fresh_start_begins_with_no_metrics(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    begin(path).close()
    assert steps(path) == []


def test_resuming_where_metrics_were_lost(path: Path) -> None:
    begin(path, done_steps=5).close()
    assert steps(path) == []


def test_the_end_of_an_earlier_run_is_forgotten(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "exit.json").write_text("{}")
    begin(path, done_steps=1).close()
    assert not (path / "exit.json").exists()


def test_a_small_file_is_whole_or_not_there(path: Path) -> None:
    run_dir = RunDir(path)
    run_dir.write_json("summary.json", {"steps": 1})
    with pytest.raises(TypeError):
        run_dir.write_json("summary.json", {"steps": object()})
    assert json.loads((path / "summary.json").read_text()) == {"steps": 1}
    run_dir.write_json("summary.json", {"steps": 2})
    assert json.loads((path / "summary.json").read_text()) == {"steps": 2}
    assert [entry.name for entry in path.iterdir()] == ["summary.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(path)
    run_dir.write_json("summary.json", {"steps": 1})

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises((OSError, RunError), match="No space left"):
        run_dir.write_json("summary.json", {"steps": 2})
    assert json.loads((path / "summary.json").read_text()) == {"steps": 1}


def test_another_runs_checkpoints_are_safe(path: Path) -> None:
    run_dir = RunDir(path)
    run_dir.checkpoints.mkdir(parents=True)
    run_dir.refuse_overwrite()  # a directory without checkpoints may be used
    (run_dir.checkpoints / "step-00000010").mkdir()
    with pytest.raises(ConfigError, match=f"{path} already holds a run; .*--resume auto"):
        run_dir.refuse_overwrite()


def test_a_fresh_directory_is_named_after_preset_and_time() -> None:
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}", default_out(CONFIG))


def test_metrics_stay_json_when_a_loss_is_not_a_number(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.begin(recipe("tiny"), World(), threads=1, done_steps=0)
    run_dir.log_metrics({"step": 1, "train/loss": float("nan")})
    run_dir.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] is None


# -- whose it is ----------------------------------------------------------------------------------


def test_it_is_its_users_alone(path: Path) -> None:
    run_dir = begin(path)
    run_dir.log_metrics({"step": 1})
    with run_dir.rank_log(replace(WORLD, rank=3, local_rank=1)) as begin_log:
        begin_log()
    run_dir.write_json("summary.json", {})
    run_dir.close()
    write_checkpoint(path)
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in (path, *path.rglob("*"))}
    assert len(modes) == 12
    for entry, mode in modes.items():
        assert mode == (0o700 if entry.is_dir() else 0o600), entry


def write_checkpoint(path: Path) -> None:
    tensors = {"model": {"w": torch.ones(1)}}
    CheckpointStore(path / "checkpoints").save(Snapshot(step=1, tensors=tensors, state={}))


def test_a_directory_that_was_there_keeps_its_mode(path: Path) -> None:
    path.mkdir(parents=True, mode=0o755)
    begin(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "env.json").stat().st_mode) == 0o600


def test_nothing_is_written_through_a_link(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = ("env.json", "config.yaml", "metrics.jsonl", "exit.json", "summary.json")
    (path / "logs").mkdir(parents=True)
    for name in names:
        (path / name).symlink_to(victim)
        (path / f".{name}.tmp").symlink_to(victim)
        (path / f".tmp-{name}-{os.getpid()}").symlink_to(victim)
    (path / "logs" / "rank_00000.log").symlink_to(victim)
    run_dir = begin(path, done_steps=3)
    run_dir.log_metrics({"step": 4})
    for name in ("exit.json", "summary.json"):
        run_dir.write_json(name, {})
    run_dir.close()
    with pytest.raises(ConfigError, match="symbolic links"), run_dir.rank_log(WORLD) as begin_log:
        begin_log()
    assert victim.read_text() == "precious"
    assert not any((path / name).is_symlink() for name in names)


def test_a_pipe_in_the_place_of_a_log_is_refused(path: Path) -> None:
    (path / "logs").mkdir(parents=True)
    os.mkfifo(path / "logs" / "rank_00000.log")
    refused = pytest.raises(ConfigError, match=r"No such device|is a pipe")
    with refused, RunDir(path).rank_log(WORLD) as begin_log:
        begin_log()
