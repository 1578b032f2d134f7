"""Contestants, sets of ranks and their turns, what fits into memory and time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from unittest import mock

import msgspec
import pytest

from gradsync.commands.bench import sync_plan
from gradsync.commands.bench.steps import my_set, take_turn
from gradsync.commands.bench.sync_plan import (
    BenchPlan,
    SyncSettings,
    bench_plan,
    parse_contestants,
    side_by_side,
)
from gradsync.errors import ConfigError


def names(text: str) -> list[str]:
    return [each.label for each in parse_contestants(text)]


def test_options_belong_to_the_name_before_them() -> None:
    first, second = parse_contestants("bucketed:bucket_mb=1,collective=backend, torch_ddp")
    assert first.label == "bucketed:bucket_mb=1,collective=backend"
    assert first.options == {"bucket_mb": 1, "collective": "backend"}
    assert (second.label, second.options) == ("torch_ddp", {})
    assert parse_contestants("flat:overlap=false")[0].options == {"overlap": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucketd", "perhaps you meant 'bucketed'"),
        ("torch_dpd", "perhaps you meant 'torch_ddp'"),
        ("bucketed:bucket=1", "has no option 'bucket'"),
        ("bucketed:bucket_mb=abc", "bucket_mb must be a positive, finite number; got 'abc'"),
        ("accelerate:bucket_mb=1", "accelerate takes no options"),
        ("none:bucket_mb=1,flat", "unknown contestant 'none'"),
        ("naive,flat,naive", "naive is named twice"),
        (" ,", "at least one"),
    ],
)
def test_contestants_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_contestants(text)


def test_a_missing_package_is_named_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.commands.bench.sync_plan.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package lightning_fabric.*gradsync\[bench\]"):
        parse_contestants("naive,fabric")
    assert names("default")[-1] == "torch_ddp"
    assert "fsdp" in names("all")


def test_rounds_begin_with_another_contestant_each_in_turns_backwards() -> None:
    settings = SyncSettings(model_size="tiny", rounds=3)
    plan = bench_plan(settings, parse_contestants("naive,torch_ddp:static_graph=true,flat"), 2, 1)
    order = [each.label for each in plan.turns()]
    every = ["none", "naive", "torch_ddp:static_graph=true", "flat"]
    assert order == every + every[1::-1] + every[:1:-1] + every[2:] + every[:2]
    assert plan.world_sizes == (2,)
    assert msgspec.convert(json.loads(json.dumps(asdict(plan))), BenchPlan) == plan


def test_ranks_of_one_start_form_sets() -> None:
    found = []
    for rank in range(5):
        index, variables = my_set({"RANK": str(rank), "WORLD_SIZE": "5"}, [2, 3])
        assert variables["LOCAL_RANK"] == variables["RANK"]
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"]
        restarts = variables["TORCHELASTIC_RESTART_COUNT"]
        found.append((index, variables["RANK"], variables["WORLD_SIZE"], restarts))
    first = [(0, str(rank), "2", "1000") for rank in range(2)]
    assert found == first + [(1, str(rank), "3", "1001") for rank in range(3)]


def test_models_stay_where_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SyncSettings(model_size="tiny")
    need = 3 * 8 * 20 * settings.config.num_params()
    for free, stays in ((2 * need, True), (2 * need - 100, False)):
        monkeypatch.setattr(sync_plan, "available_bytes", lambda free=free: free)
        found = side_by_side(replace(settings, device="cpu"), ranks=3, models=8)
        assert found.side_by_side is stays


def test_nothing_waits_between_the_warm_up_and_the_clock() -> None:
    """What the warm-up leaves to send counts, as what the last step leaves does not."""
    entrant = mock.Mock()
    entrant.site.settings = SyncSettings(model_size="tiny", num_warmup=2, num_steps=1)
    take_turn(entrant)
    called = [name for name, _, _ in entrant.mock_calls]
    assert called[:4] == ["site.comm.barrier", "step", "step", "clock.begin"]
    assert called[-2:] == ["clock.read", "wait"]
