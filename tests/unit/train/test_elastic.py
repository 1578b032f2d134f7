"""`gradsync train --elastic`: what is decided from the hardware, and what the user's word is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsync.comm.groups import SingleCommunicator
from gradsync.commands.cli import elastic as command
from gradsync.commands.cli.elastic import before_ranks, given_fields, take_flag, with_ranks
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.measured import Conditions
from gradsync.commands.train import micro_batch
from gradsync.commands.train.config import SyncConfig, TrainConfig, recipe
from gradsync.commands.train.config_io import parse_config, write_config
from gradsync.commands.train.elastic import ConfigChanges, decide
from gradsync.commands.train.micro_batch import (
    PROBED,
    Probed,
    find_micro_batch,
    sizes_of,
)
from gradsync.errors import ConfigError, RunError
from gradsync.world import World
from support.small_run import small_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))


def decided(config: TrainConfig, hardware: str, *given: str, **named: Any) -> ConfigChanges:
    return decide(config, frozenset(given), config.model, load_hardware(hardware), {}, **named)


def test_the_arguments(tmp_path: Path) -> None:
    for word in ("--elastic", "--elastic-gpu", "--elastic_gpu"):
        assert take_flag(["tiny", word, "--steps", "3"]) == ([word], ["tiny", "--steps", "3"])
    assert take_flag(["tiny"]) == (None, ["tiny"])
    flags = ["--micro-batch-size", "4", "--no-tf32", "--sync-options", "bucket_mb=5", "--sync=x"]
    assert given_fields(["tiny", *flags]) == {"micro_batch_size", "tf32", "sync_options", "sync"}
    path = tmp_path / "mine.yaml"
    path.write_text("dtype: fp32\nsync-options.bucket-mb: 5\n")
    assert given_fields([str(path), "--steps", "5"]) == {"dtype", "steps", "sync_options"}


def test_ranks_and_strategy_follow_the_hardware() -> None:
    decision = decided(recipe("small"), "h100x4")
    assert decision.ranks == 4
    assert decision.changes["dtype"] == "bf16"
    assert decision.applied_to(recipe("small")).sync == decision.changes["sync"]
    assert any("NCCL_DEBUG" in note for note in decision.notes)
    with pytest.raises(RunError, match=r"fits nowhere.* GB"):
        decided(recipe("2.7b"), "a100-40x1", "sync")


def test_what_was_given_stays() -> None:
    config = replace(recipe("small"), sync="ddp", dtype="fp32", micro_batch_size=2)
    decision = decided(config, "h100x4", "sync", "dtype", "micro_batch_size", "tf32")
    assert not decision.changes.keys() & {"sync", "dtype", "micro_batch_size", "tf32"}
    auto = decided(replace(recipe("small"), sync="auto"), "h100x4", "sync")
    assert ("sync" in auto.changes, auto.ranks) == (False, 4)
    hardware, shape = load_hardware("h100x4").with_devices(2), recipe("small").model
    assert decide(recipe("small"), frozenset(), shape, hardware, {}, world_size=2).ranks == 2


def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path: Path) -> None:
    kept = {"sync": "bucketed", "dtype": "fp32", "micro_batch_size": 4}
    options = SyncConfig(bucket_mb=5.0)
    begun = small_config(tmp_path, tmp_path, **kept, sync_options=options)
    write_config(begun, tmp_path / "config.yaml")
    asked = replace(recipe("tiny"), out=str(tmp_path))
    assert decided(asked, "h100x4").changes["sync"] != "bucketed"  # there is no checkpoint yet
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    decision = decided(asked, "h100x4")
    assert decision.notes[0].startswith("goes on as it began: dtype fp32, ")
    config = decision.applied_to(asked)
    assert {name: getattr(config, name) for name in kept} == kept
    assert config.sync_options == options
    assert decision.ranks == 4
    mine = decided(replace(asked, micro_batch_size=2), "h100x4", "micro_batch_size")
    assert "micro_batch_size" not in mine.changes
    for sync in ("naive", "auto"):  # which have no options, or choose them
        other = decided(replace(asked, sync=sync), "h100x4", "sync")
        assert other.applied_to(replace(asked, sync=sync)).sync_options == SyncConfig()


@pytest.mark.parametrize(
    "line", ["parallel: 3", "micro_batch_size: some", "sync_options: {bucket_mb: many}"]
)
def test_a_run_whose_file_was_edited_is_refused_by_the_key(line: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(f"sync: bucketed\n{line}\n")
    key = line.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"config\.yaml: {key}[.\w]*: got .*, expected "):
        decided(replace(recipe("tiny"), out=str(tmp_path)), "h100x4")


# -- before the ranks -----------------------------------------------------------------------------


def alone(
    monkeypatch: pytest.MonkeyPatch, hardware: str, *flags: str
) -> tuple[TrainConfig, list[str]]:
    """`before_ranks` in a process that no launcher started, on some hardware."""
    monkeypatch.setattr(command, "_hardware", lambda *_: load_hardware(hardware))
    words, flags_left = take_flag(["tiny", "--elastic", *flags])
    assert words is not None
    return before_ranks(parse_config(flags_left), words, flags_left, World())


def test_ranks_get_everything_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, flags = alone(monkeypatch, "h100x2")
    assert config.nproc_per_node == 2
    words, flags = take_flag(flags)
    assert words == ["--elastic=decided"]
    handed = parse_config(flags)
    assert replace(handed, micro_batch_size=config.micro_batch_size) == config
    assert {"sync", "dtype", "nproc_per_node"} <= given_fields(flags)
    assert "micro_batch_size" not in given_fields(flags)
    said = capsys.readouterr().err
    assert "elastic: 2 ranks, one per GPU" in said


def test_a_micro_batch_that_so_many_ranks_cannot_share_is_only_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tiny has 16 sequences: 8 leaves of 2, too few for 16 ranks."""
    config, _ = alone(monkeypatch, "h100x8", "--nproc-per-node", "16", "--sync", "auto")
    assert config.micro_batch_size == 1
    config.batch_plan(16)


# -- the probe on this machine --------------------------------------------------------------------


def probe(config: TrainConfig, **world: int) -> tuple[int, str]:
    return find_micro_batch(config, config.model, World(**world), SingleCommunicator(), threads=1)


def test_it_runs_once_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, tmp_path, tokens_per_update=32)
    torch_state = torch.get_rng_state()
    size, note = probe(replace(config, model=replace(config.model, dropout=0.0)))
    assert size in (1, 2)
    assert "tried 1, 2" in note
    assert torch.equal(torch.get_rng_state(), torch_state)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(micro_batch, "try_sizes", never)
    again, note = probe(replace(config, model=replace(config.model, dropout=0.0)))
    assert again == size
    assert "probed 20" in note


def test_memory_that_is_too_small_or_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, tmp_path)
    found = SimpleNamespace(
        limit_bytes=10**5, works=True, clear=lambda: None, run=lambda _: pytest.fail("it was tried")
    )
    monkeypatch.setattr(micro_batch, "MemoryProbe", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"does not fit: a micro-batch of 1 x 16 .* GB short"):
        probe(config)
    found.works = False
    assert probe(config)[0] == 2  # it stays


def test_with_ranks_leaves_what_was_given(tmp_path: Path) -> None:
    config = small_config(tmp_path, tmp_path)
    flags = ["--micro-batch-size", "2", "--elastic=decided"]
    got = with_ranks(config, flags, World(), SingleCommunicator(), threads=1)
    assert got == (config, [])


def test_sizes_of_a_batch_nobody_can_share(tmp_path: Path) -> None:
    config = small_config(tmp_path, tmp_path)  # 16 sequences of 16 tokens
    assert sizes_of(config, 4) == (1, 2, 4)
    with pytest.raises(ConfigError, match="17 ranks cannot share 16 sequences"):
        sizes_of(config, 17)
    with pytest.raises(ConfigError, match="not a multiple of seq_len = 16"):
        sizes_of(replace(config, tokens_per_update=100), 1)
    with pytest.raises(ConfigError, match="evenly"):
        sizes_of(replace(config, sync="fsdp"), 3)


# -- the cache ------------------------------------------------------------------------------------

CONDITIONS: Conditions = {"model": {"n_layer": 2}, "sizes": [1, 2, 4], "world_size": 2}
FOUND = Probed(size=4, peak_bytes=800, limit_bytes=1000, date="2026-01-02")


def test_the_cache_gives_back_what_it_got() -> None:
    """Its other refusals are tested with `--sync auto`, whose cache is of the same kind."""
    assert PROBED.read(CONDITIONS) is None
    path = PROBED.save(CONDITIONS, FOUND)
    assert PROBED.read(CONDITIONS) == FOUND
    assert PROBED.read(CONDITIONS | {"world_size": 4}) is None
    path.write_text("{}")
    assert PROBED.read(CONDITIONS) is None


@pytest.mark.parametrize(("name", "value"), [("size", 3), ("size", True), ("peak_bytes", 0)])
def test_a_file_that_says_what_cannot_be_is_measured_anew(name: str, value: Any) -> None:
    PROBED.save(CONDITIONS, replace(FOUND, **{name: value}))
    assert PROBED.read(CONDITIONS) is None


def test_it_holds_where_there_is_about_as_much_room() -> None:
    assert FOUND.holds(1000)
    assert FOUND.holds(1249)
    assert not FOUND.holds(1251)  # more may fit now
    assert FOUND.holds(800)
    assert not FOUND.holds(799)
