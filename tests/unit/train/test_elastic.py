"""`gradsync train --elastic`: what is decided from the hardware, and what the user's word is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.cli import train as command
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.train.config import SyncConfig, TrainConfig, recipe
from gradsync.commands.train.config_io import given_fields, parse_config, write_config
from gradsync.commands.train.elastic import Decision, decide, hardware_of, take_flag
from gradsync.errors import RunError
from gradsync.world import World
from support.small_run import small_config


def decided(config: TrainConfig, hardware: str, *given: str, **named: Any) -> Decision:
    config = replace(config, dtype="bf16") if config.dtype == "auto" else config
    return decide(config, frozenset(given), load_hardware(hardware), **named)


def test_the_arguments(tmp_path: Path) -> None:
    for word in ("--elastic", "--elastic-gpu", "--elastic_gpu"):
        assert take_flag(["tiny", word, "--steps", "3"]) == (True, ["tiny", "--steps", "3"])
    assert take_flag(["tiny"]) == (False, ["tiny"])
    flags = ["--micro-batch-size", "4", "--no-tf32", "--sync-options", "bucket_mb=5", "--sync=x"]
    assert given_fields(["tiny", *flags]) == {"micro_batch_size", "tf32", "sync_options", "sync"}
    path = tmp_path / "mine.yaml"
    path.write_text("dtype: fp32\nsync-options.bucket-mb: 5\n")
    assert given_fields([str(path), "--steps", "5"]) == {"dtype", "steps", "sync_options"}


def test_ranks_and_strategy_follow_the_hardware() -> None:
    decision = decided(recipe("small"), "h100x4")
    assert decision.ranks == 4
    assert decision.applied_to(recipe("small")).sync == decision.changes["sync"]
    with pytest.raises(RunError, match=r"fits nowhere.* GB"):
        decided(recipe("2.7b"), "a100-40x1", "sync")


def test_what_was_given_stays() -> None:
    config = replace(recipe("small"), sync="ddp", dtype="fp32", micro_batch_size=2)
    decision = decided(config, "h100x4", "sync", "dtype", "micro_batch_size")
    assert not decision.changes.keys() & {"sync", "dtype", "micro_batch_size"}
    auto = decided(replace(recipe("small"), sync="auto"), "h100x4", "sync")
    assert ("sync" in auto.changes, auto.ranks) == (False, 4)
    config = replace(recipe("small"), dtype="bf16")
    two = load_hardware("h100x4").with_devices(2)
    assert decide(config, frozenset(), two, world_size=2).ranks == 2


def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path: Path) -> None:
    kept = {"sync": "bucketed", "micro_batch_size": 4}
    options = SyncConfig(bucket_mb=5.0)
    begun = small_config(tmp_path, tmp_path, **kept, sync_options=options)
    write_config(begun, tmp_path / "config.yaml")
    asked = replace(recipe("tiny"), out=str(tmp_path))
    assert decided(asked, "h100x4").changes["sync"] != "bucketed"  # there is no checkpoint yet
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    decision = decided(asked, "h100x4")
    assert decision.notes[0].startswith(f"goes on as it began in {tmp_path}/config.yaml: sync ")
    config = decision.applied_to(asked)
    assert {name: getattr(config, name) for name in kept} == kept
    assert config.sync_options == options
    assert decision.ranks == 4
    mine = decided(replace(asked, micro_batch_size=2), "h100x4", "micro_batch_size")
    assert "micro_batch_size" not in mine.changes
    for sync in ("naive", "auto"):  # which have no options, or choose them
        other = decided(replace(asked, sync=sync), "h100x4", "sync")
        assert other.applied_to(replace(asked, sync=sync)).sync_options == SyncConfig()


# -- before the ranks -----------------------------------------------------------------------------


def alone(
    monkeypatch: pytest.MonkeyPatch, hardware: str, *flags: str
) -> tuple[TrainConfig, list[str]]:
    """The choice of a process that no launcher started, on some hardware."""
    monkeypatch.setattr(command, "hardware_of", lambda *_: load_hardware(hardware))
    asked, others = take_flag(["tiny", "--elastic", *flags])
    assert asked
    return command._for_this_machine(parse_config(others), others, World())


def test_ranks_get_everything_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, flags = alone(monkeypatch, "h100x2")
    assert config.nproc_per_node == 2
    assert parse_config(flags) == config
    assert {"sync", "micro_batch_size", "nproc_per_node"} <= given_fields(flags)
    assert "elastic: 2 ranks, one per device" in capsys.readouterr().err


def test_the_largest_micro_batch_that_fits_a_gpu_and_the_usual_one_on_a_cpu() -> None:
    small = recipe("small")
    assert decided(small, "h100x1").changes["micro_batch_size"] > small.micro_batch_size
    checked = replace(recipe("tiny"), dtype="fp32", micro_batch_size=1, device="cpu")
    here = hardware_of(checked, {}, World())
    on_cpu = decide(checked, frozenset(), here, world_size=1)
    assert on_cpu.changes["micro_batch_size"] == 1
    fixed = decided(small, "h100x1", "micro_batch_size")
    assert "micro_batch_size" not in fixed.changes
