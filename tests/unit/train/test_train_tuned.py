"""`--sync auto`: what is looked up, what is believed, and what the run writes down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsync.commands.bench import experiment
from gradsync.commands.bench.experiment import environment
from gradsync.commands.bench.tune import TuneOptions, measured_conditions, request_of
from gradsync.commands.cli.main import main
from gradsync.commands.launch.ranks import RanksOutcome
from gradsync.commands.plan.measured import Conditions
from gradsync.commands.train.config import SyncConfig, TrainConfig
from gradsync.commands.train.config_io import parse_config, write_config
from gradsync.commands.train.tuned import (
    TUNED,
    Tuned,
    TunedStrategy,
    apply_choice,
    conditions_of,
    resolve_auto,
)
from gradsync.world import World

WORLD = World(world_size=2, local_world_size=2)
ZERO1 = TunedStrategy(sync="zero1", options={"bucket_mb": 5.0})
FOUND = Tuned(choice=ZERO1, verdict="zero1 takes 9.0 % less time", date="2026-01-02")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))


def asked(*flags: str) -> TrainConfig:
    named = ("--sync", "auto", "--device", "cpu", "--dtype", "bf16")
    return parse_config(["tiny", *named, *flags])


def here(config: TrainConfig, world: World = WORLD) -> Conditions:
    return conditions_of(config, world, threads=config.threads or 1)


def resolved(config: TrainConfig, world: World = WORLD) -> tuple[TunedStrategy, str]:
    return resolve_auto(config, world, threads=1)


def chosen(config: TrainConfig) -> TunedStrategy:
    return resolved(config)[0]


def test_what_was_kept_is_taken(tmp_path: Path) -> None:
    config = asked()
    path = TUNED.save(here(config), FOUND)
    assert TUNED.read(here(config)) == FOUND
    assert resolved(config) == (
        ZERO1,
        "sync auto: zero1:bucket_mb=5.0 (promise: bitwise); 2026-01-02: zero1 takes 9.0 % less "
        "time",
    )
    assert sorted(path.parent.iterdir()) == [path]
    # Replaced in one step: a reader that has the old one open reads the old one.
    old = tmp_path / "old"
    old.hardlink_to(path)
    TUNED.save(here(config), replace(FOUND, choice=TunedStrategy()))
    assert chosen(config) == TunedStrategy()
    assert json.loads(old.read_text())["choice"]["sync"] == "zero1"


@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "fp32"),
        ("--model.n-layer", "3"),
        ("--model.vocab-size", "300"),
        ("--no-keep-memory",),
    ],
)
def test_another_run_is_another_entry(flags: tuple[str, ...]) -> None:
    TUNED.save(here(asked()), FOUND)
    choice, note = resolved(asked(*flags))
    assert choice == TunedStrategy()
    assert note.startswith("sync auto: invariant; nothing is measured for such a run here: ")


def test_another_machine_is_another_entry_and_what_does_not_matter_is_none() -> None:
    conditions = here(asked())
    TUNED.save(conditions, FOUND)
    changes: dict[str, Any] = {
        "world_size": 3, "num_nodes": 2, "threads": 2, "device": "H200", "cpu": "another",
        "cores": 999, "torch": "1.0",
    }  # fmt: skip
    for name, value in changes.items():
        assert TUNED.read(conditions | {name: value}) is None, name
    free = ("--optim.lr", "0.1", "--seed", "3", "--steps", "7", "--model.dropout", "0.1")
    assert chosen(asked(*free)) == ZERO1
    assert chosen(asked("--model.block-size", "512", "--seq-len", "256")) == ZERO1


def damage(document: dict[str, Any], key: str, value: Any) -> str:
    *parents, last = key.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format_version", 99, "format_version 99, not 1"),
        ("choice.sync", "zero9", "unknown sync strategy 'zero9'"),
        ("choice.options", {"bucket_mb": -1}, "bucket_mb must be positive"),
        ("choice.options", {"buckets": 1}, "no option 'buckets'"),
        ("choice.sync", "bf16", "bf16 is lossy"),
        ("choice.extra", 1, "extra"),
        ("conditions.cores", 999, "it was measured for something else"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_line_and_the_default(
    key: str, value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = asked()
    path = TUNED.save(here(config), FOUND)
    path.write_text(damage(json.loads(path.read_text()), key, value))
    choice, note = resolved(config)
    assert choice == TunedStrategy()
    [warning] = caplog.messages
    assert reason in warning
    assert str(path) in warning
    assert "\n" not in warning
    assert "nothing is measured for such a run here: `gradsync tune tiny --world-size 2`" in note


def test_the_cache_is_tried_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setattr(experiment, "measure_on_ranks", None)
    assert main(["tune", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert f"GRADSYNC_CACHE {tmp_path / 'cache' / 'tuned'}: {tmp_path / 'cache'} is no" in error
    assert error.count("\n") == 1


def test_a_cache_that_fails_at_the_end_takes_nothing_else_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(rank=0, world_size=4, local_world_size=4, launcher="torchrun")
    result = {
        "choice": {},
        "stages": [],
        "environment": environment(world_size=4, threads=1),
        "samples": {},
        **{"num_nodes": 1, "device": "cpu"},
    }

    def measured(*_: Any, **__: Any) -> RanksOutcome:
        (tmp_path / "cache").touch()
        return RanksOutcome(code=0, result=result)

    monkeypatch.setattr(experiment, "measure_on_ranks", measured)
    monkeypatch.setattr(experiment, "resolve", lambda _: SimpleNamespace(world=world))
    assert main(["tune", "--device", "cpu", "--json", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "could not write" in printed.err
    document = json.loads(printed.out)
    assert document["command"].startswith("gradsync tune --world-size 4")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["cache"] == document["cache"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tune_writes_what_the_next_auto_reads(world_size: int) -> None:
    options = TuneOptions(model="tiny", world_size=world_size, dtype="bf16", device="cpu")
    result = {"num_nodes": 1, "device": "cpu"}
    world = World(world_size=world_size, local_world_size=world_size)
    written = measured_conditions(request_of(options, World()), result)
    assert written == here(asked(), world)


def test_one_rank_has_nothing_to_send() -> None:
    alone = "sync auto: invariant; one rank has nothing to send"
    assert resolved(asked(), World()) == (TunedStrategy(), alone)


def test_the_run_writes_down_what_it_took(tmp_path: Path) -> None:
    config = apply_choice(asked(), ZERO1, threads=4)
    assert (config.sync, config.sync_options) == ("zero1", SyncConfig(bucket_mb=5.0))
    assert config.threads is None  # 1 by the promise
    write_config(config, tmp_path / "config.yaml")
    assert parse_config([str(tmp_path / "config.yaml")]) == config
    rounding = TunedStrategy(sync="bucketed", options={"collective": "backend"})
    kept = apply_choice(asked(), rounding, threads=4)
    assert kept.threads == 4  # its own would be another number, and other bits
    assert apply_choice(asked("--threads", "2"), rounding, threads=4).threads == 2


def test_the_order_of_compilation_is_the_users_first() -> None:
    compiled = TunedStrategy(compile="model")
    assert apply_choice(asked(), compiled, threads=1).compile == "model"
    assert apply_choice(asked("--compile", "model"), TunedStrategy(), threads=1).compile == "model"
    ddp = TunedStrategy(sync="ddp", compile="ddp")
    assert apply_choice(asked("--compile", "model"), ddp, threads=1).compile == "model"


def begun(folder: Path, *, sync: str = "zero1") -> TrainConfig:
    """A run that has a checkpoint."""
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    config = replace(asked(), sync=sync)
    if sync == "zero1":
        config = replace(config, sync_options=SyncConfig(bucket_mb=5.0))
    write_config(config, folder / "config.yaml")
    return replace(config, sync="auto", sync_options=SyncConfig(), out=str(folder))


def test_a_run_goes_on_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements made since do not count."""
    run = tmp_path / "run"
    config = begun(run)
    TUNED.save(here(config), replace(FOUND, choice=TunedStrategy(sync="bucketed")))
    note = f"sync auto: zero1:bucket_mb=5.0, as in {run / 'config.yaml'}"
    assert resolved(config) == (ZERO1, note)
    elsewhere = replace(config, out=str(tmp_path / "new"))
    assert chosen(elsewhere).sync == "bucketed"
    begun(tmp_path / "step-sweep")
    begun(run / "none")
    monkeypatch.chdir(run)
    absolute = (run, run / "checkpoints", run / "checkpoints" / "step-00000002")
    for place in (*map(str, absolute), str(tmp_path / "step-sweep"), ".", "checkpoints"):
        assert chosen(replace(elsewhere, resume=place)) == ZERO1, place
    assert chosen(replace(config, resume="none")).sync == "bucketed"
    assert chosen(replace(elsewhere, resume="other")).sync == "bucketed"
    (run / "checkpoints" / "step-00000002").rmdir()  # without a checkpoint it begins anew
    assert chosen(config).sync == "bucketed"


def test_the_shape_counts_as_the_data_makes_it() -> None:
    assert here(asked())["model"]["vocab_size"] == 257  # of bytes
    wide = replace(asked(), model=replace(asked().model, hidden_dim=512))  # what None stands for
    assert here(wide) == here(asked())
