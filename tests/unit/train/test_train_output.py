"""Output of a run, and the files that it leaves behind, also after it was killed and went on."""

from __future__ import annotations

import io
import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.commands.plan.description import Device
from gradsync.commands.train import output
from gradsync.commands.train.config import recipe
from gradsync.commands.train.config_io import parse_config
from gradsync.commands.train.output import (
    Progress,
    RankTable,
    RunDir,
    default_out,
    describe_environment,
)
from gradsync.commands.train.run import note_failure
from gradsync.errors import ConfigError, DivergenceError, LatePeerError, PeerError
from gradsync.runtime.activity import Activity
from gradsync.world import World

METRICS = {
    "step": 3,
    "train/loss": 2.34567,
    "optim/lr": 6e-4,
    "optim/grad_norm": 1.234,
    "perf/tokens_per_s": 246_913.0,
    "perf/step_s": 0.5,
    "comm/exposed_s": 0.1,
}
WORDS = "loss 2.3457  norm 1.23  lr 6.00e-04  123,456 tok/s/device  exposed 20%"


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(10, 2, enabled=False, stream=stream)
    progress.say("a line")
    progress.show(METRICS)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("start", "step", "elapsed_s", "eta"),
    [
        (0, 100, 100.0, "0:15:00"),
        (0, 1, 10.0, "2:46:30"),
        (0, 1000, 1.0, "0:00:00"),
        (900, 950, 100.0, "0:01:40"),  # steps of an earlier run took no time of this one
    ],
)
def test_a_plain_line_with_the_time_left(
    start: int, step: int, elapsed_s: float, eta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((0.0, 50.0, 50.0 + elapsed_s))
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: next(now)))
    stream = io.StringIO()
    progress = Progress(1000, 2, enabled=True, stream=stream)
    progress.start(start)
    progress.show(METRICS | {"step": step})
    assert stream.getvalue() == f"step {step:>4}/1000  {WORDS}  eta {eta}\n"


# -- the run directory ----------------------------------------------------------------------------

CONFIG = recipe("tiny")
DEVICE = Device(kind="cpu", name="ours", memory_bytes=2**30, peak_flops=250e9)
WORLD = World(rank=0, world_size=4, local_world_size=2, num_nodes=2, launcher="srun")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def begin(path: Path, *, done_steps: int = 0, world: World = WORLD) -> RunDir:
    run_dir = RunDir(path)
    run_dir.begin(CONFIG, world, DEVICE, threads=3, done_steps=done_steps)
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
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}", default_out(CONFIG))


def test_the_beginning_is_written_down(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "exit.json").write_text("{}")  # the end of an earlier run is forgotten
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    begin(path).close()
    assert sorted(os.listdir(path)) == ["config.yaml", "env.json", "metrics.jsonl", "starts.jsonl"]
    assert parse_config([str(path / "config.yaml")]) == CONFIG
    described = json.loads((path / "env.json").read_text())
    load = {"load_at_start": described["load_at_start"]}  # another one by now
    assert described == describe_environment(WORLD, DEVICE, 3) | load
    expected = {
        "peak_tflops": 0.25,
        "launcher": "srun",
        "world_size": 4,
        "num_nodes": 2,
        "device": "cpu",
        "threads": 3,
    }
    assert described.items() >= expected.items()
    assert {"host", "platform", "python", "torch", "gradsync", "argv", "cores"} <= set(described)
    assert (path / "metrics.jsonl").read_text() == ""


def test_the_table_of_ranks_is_there_at_once_and_outlasts_a_store_that_goes(path: Path) -> None:
    path.mkdir(parents=True)
    told = iter([{0: Activity(beat=1, step=3), 1: Activity(beat=2, step=4)}])
    table = RankTable(path / "ranks.json", lambda: next(told), world_size=2, done_steps=0)
    table.every_s = 0.0
    table._thread.join(timeout=60)  # the second look raises
    assert not table._thread.is_alive()
    table.close()
    document = json.loads((path / "ranks.json").read_text())
    assert [(row["rank"], row["step"]) for row in document["ranks"]] == [(0, 3), (1, 4)]
    assert stat.S_IMODE((path / "ranks.json").stat().st_mode) == 0o600


def test_the_table_tells_who_waits_for_whom(path: Path) -> None:
    path.mkdir(parents=True)
    table = RankTable(path / "ranks.json", dict, world_size=4, done_steps=2)
    table.close()
    table._looks.clear()  # its own look, on another clock

    def at(now: float, beat: int) -> list[dict[str, Any]]:
        found = {
            0: Activity(beat=beat, waits=beat > 1, since_s=now, step=int(now), where="a"),
            1: Activity(beat=beat, step=int(now) - 1, where="b"),
            2: Activity(beat=beat, excused=True, step=int(now)),
            3: Activity(beat=1),  # it has not told of a step since it went on from the second
        }
        return table.rows(found, now)

    assert [row["steps_per_s"] for row in at(2.0, 1)] == [None] * 4
    assert [row["phase"] for row in at(4.0, 2)] == ["waits", "computes", "saves", "computes"]
    rows = at(8.0, 3)
    assert [row["phase"] for row in rows] == ["waits", "computes", "saves", "silent"]
    assert [row["lag_s"] for row in rows] == [0.0, 8.0, 0.0, 8.0]
    assert [row["steps_per_s"] for row in rows] == pytest.approx([1.0, 5 / 6, 1.0, 0.0])
    assert [row["step"] for row in rows] == [8, 7, 8, 2]
    assert [row["waited"] for row in rows] == pytest.approx([2 / 3, 0.0, 0.0, 0.0])
    assert rows[0]["where"] == "a"


def test_metrics_are_there_at_once_and_are_json(path: Path) -> None:
    run_dir = begin(path)
    run_dir.log_metrics({"step": 1, "train/loss": float("nan"), "optim/grad_norm": None})
    text = (path / "metrics.jsonl").read_text()  # before the file is closed
    assert text == '{"step": 1, "train/loss": null, "optim/grad_norm": null}\n'
    run_dir.close()
    run_dir.close()
    run_dir.log_metrics({"step": 2})
    assert steps(path) == [1]


@pytest.mark.parametrize("torn", ['{"step": 1', "null", '{"loss": 1.0}', '{"step": "x"}', "[1]"])
def test_steps_done_again_and_a_torn_line_are_dropped(path: Path, torn: str) -> None:
    run_dir = begin(path, done_steps=5)  # where metrics were lost
    for step in (1, 2, 2, 3, 4):  # step 2 has a line for its evaluation
        run_dir.log_metrics({"step": step})
    run_dir.close()
    with (path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed = begin(path, done_steps=2)
    resumed.log_metrics({"step": 3})
    resumed.close()
    assert steps(path) == [1, 2, 2, 3]


def test_what_a_comparison_found_stays_where_steps_are_done_again(path: Path) -> None:
    first = begin(path)
    for record in (
        {"step": 2, "train/loss": 1.0},
        {"step": 4, "check/replicas_equal": 1},
        {"step": 5, "check/audit_equal": 0},
    ):
        first.log_metrics(record)
    first.close()
    (path / "ranks.json").write_text("{}")
    begin(path, done_steps=2).close()
    assert steps(path) == [2, 5]
    last = json.loads((path / "starts.jsonl").read_text().splitlines()[-1])
    assert last["reached"] == 2, "a comparison is no step"
    assert not (path / "ranks.json").exists(), "of ranks that are no more"


def test_each_start_says_how_the_run_before_ended_and_how_far_it_had_come(path: Path) -> None:
    first = begin(path)
    for step in (1, 2, 3):
        first.log_metrics({"step": step})
    first.write_json("exit.json", {"exit_code": 1, "reason": "failed", "error": "rank 1"})
    first.close()
    begin(path, done_steps=2, world=replace(WORLD, world_size=2)).close()
    begin(path, done_steps=2).close()
    starts = [json.loads(line) for line in (path / "starts.jsonl").read_text().splitlines()]
    assert [start.pop("time")[:2] for start in starts] == ["20"] * 3
    failed = {"exit_code": 1, "reason": "failed", "error": "rank 1"}
    common = {"world_size": 4}
    assert starts == [
        {**common, "step": 0, "reached": None, "before": None},
        {**common, "step": 2, "reached": 3, "before": failed, "world_size": 2},
        {**common, "step": 2, "reached": 2, "before": None},
    ]


def test_another_runs_checkpoints_are_safe(path: Path) -> None:
    run_dir = RunDir(path)
    run_dir.checkpoints.mkdir(parents=True)
    run_dir.refuse_overwrite()  # a directory without checkpoints may be used
    (run_dir.checkpoints / "step-00000010").mkdir()
    with pytest.raises(ConfigError, match=f"{path} already holds a run; .*--resume auto"):
        run_dir.refuse_overwrite()


def begin_log(path: Path, **changes: Any) -> None:
    with RunDir(path).rank_log(replace(WORLD, **changes)):
        pass


def test_it_is_its_users_alone(path: Path) -> None:
    run_dir = begin(path)
    run_dir.log_metrics({"step": 1})
    begin_log(path, rank=3, local_rank=1)
    run_dir.write_json("summary.json", {})
    run_dir.close()
    tensors = {"model": {"w": torch.ones(1)}}
    CheckpointStore(path / "checkpoints").save(Snapshot(step=1, tensors=tensors, state={}))
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in (path, *path.rglob("*"))}
    assert len(modes) == 13
    for entry, mode in modes.items():
        assert mode == (0o700 if entry.is_dir() else 0o600), entry


def test_a_directory_that_was_there_keeps_its_mode(path: Path) -> None:
    path.mkdir(parents=True, mode=0o755)
    begin(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "env.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("before", [None, 0, 75])
def test_a_refused_start_leaves_a_run_that_is_done_as_it_was(
    tmp_path: Path, before: int | None
) -> None:
    config = replace(parse_config(["tiny"]), out=str(tmp_path))
    if before is not None:
        RunDir(tmp_path).write_json("exit.json", {"exit_code": before, "reason": "its own"})
    note_failure(config, ConfigError("another seed"))
    note = json.loads((tmp_path / "exit.json").read_text())
    assert note["reason"] == ("its own" if before == 0 else "failed")  # a job must not go on by 75
    assert note.get("error") == (None if before == 0 else "another seed")


def test_an_incident_says_where_and_what_to_do(tmp_path: Path) -> None:
    config = replace(parse_config(["tiny"]), out=str(tmp_path))
    trace = 'File "torch/nn.py", line 3, in call\n  File "model.py", line 12, in forward\n'
    said = [
        PeerError("rank 1 failed", rank=1, host="b", traceback_text=trace),
        PeerError("rank 1 vanished", host="b"),
        PeerError("rank 1 failed: no such file", rank=1, host="b"),
        DivergenceError("loss is nan at step 7"),
        LatePeerError("rank 2 is late"),
    ]
    for error in said:
        note_failure(config, error)
    try:
        raise ValueError("a bug")
    except ValueError as error:
        note_failure(config, error)
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(x["kind"], x["rank"], x["host"]) for x in lines[:2]] == [
        ("PeerError", 1, "b"),
        ("PeerError", -1, "b"),
    ]
    peer, lost, its, nan, late, own = lines
    assert peer["where"] == "model.py:12"
    assert own["where"].startswith(__file__)
    assert [x["where"] for x in (lost, its, nan, late)] == [None] * 4
    words = ("code", "host", "said", "sample", "stacks")
    for line, word in zip((peer, lost, its, nan, late), words, strict=True):
        assert word in line["advice"]


@pytest.mark.parametrize(
    ("rank", "code", "lost"), [(-1, 1, "b"), (1, 1, None), (-1, 124, None)], ids=str
)
def test_only_a_vanished_ranks_host_is_left_out(
    tmp_path: Path, rank: int, code: int, lost: str | None
) -> None:
    """Not that of a rank which failed, or is only late."""
    config = replace(parse_config(["tiny"]), out=str(tmp_path))
    note_failure(config, PeerError("…", rank=rank, host="b", exit_code=code))
    assert json.loads((tmp_path / "exit.json").read_text()).get("lost_hosts") == lost


def test_a_full_disk_is_no_pages_of_logging(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "append_private", lambda _: Path("/dev/full").open("a"))  # noqa: SIM115
    with RunDir(path).rank_log(WORLD):
        output.log.warning("not to be written")
    assert capsys.readouterr().err == ""
