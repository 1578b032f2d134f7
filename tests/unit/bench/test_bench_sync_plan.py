"""Contestants, sets of ranks and their turns, what fits into memory and time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gradsync.commands.bench import sync_plan
from gradsync.commands.bench.contestants import parse_contestants, with_ideals
from gradsync.commands.bench.experiment import from_json
from gradsync.commands.bench.steps import Baton, Runner, my_set
from gradsync.commands.bench.sync_plan import BenchPlan, SyncSettings, bench_plan, side_by_side
from gradsync.errors import ConfigError


def names(text: str) -> list[str]:
    return [each.label for each in parse_contestants(text)]


def test_options_belong_to_the_name_before_them() -> None:
    first, second = parse_contestants("bucketed:bucket_mb=1,collective=backend, torch_ddp")
    assert first.label == "bucketed:bucket_mb=1,collective=backend"
    assert first.options == {"bucket_mb": 1, "collective": "backend"}
    assert (second.label, second.options) == ("torch_ddp", {})
    assert parse_contestants("flat:overlap=false")[0].options == {"overlap": False}


def test_each_setting_of_the_allocator_has_its_ideal() -> None:
    chosen = parse_contestants("naive,torch_ddp")
    both = with_ideals(chosen, same_allocator=False)
    assert [(each.label, each.keep_memory) for each in both] == [
        ("none", True),
        ("none (default malloc)", False),
        ("naive", True),
        ("torch_ddp", False),
    ]
    one = with_ideals(chosen, same_allocator=True)
    assert [each.label for each in one] == ["none", *(each.label for each in chosen)]
    assert all(each.keep_memory for each in one)
    (alone,) = with_ideals(parse_contestants("none"), same_allocator=False)
    assert alone.label == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucketd", "perhaps you meant 'bucketed'"),
        ("torch_dpd", "perhaps you meant 'torch_ddp'"),
        ("bucketed:bucket=1", "has no option 'bucket'"),
        ("bucketed:bucket_mb=abc", "bucket_mb must be a positive, finite number; got 'abc'"),
        ("torch_ddp:bucket_mb=1", "unknown option of torch_ddp 'bucket_mb'"),
        ("torch_ddp:bucket_cap_mb=abc", "bucket_cap_mb must be a positive, finite number"),
        ("torch_ddp:static_graph=foo", "static_graph must be true or false; got 'foo'"),
        ("none:bucket_mb=1,flat", "unknown contestant 'none'"),
        ("naive,flat,naive", "naive is named twice"),
        (" ,", "at least one"),
    ],
)
def test_contestants_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_contestants(text)


def test_a_missing_package_is_named_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.commands.bench.contestants.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package lightning_fabric.*gradsync\[bench\]"):
        parse_contestants("naive,fabric")
    assert names("default")[-1] == "torch_ddp"
    assert "fsdp" in names("all")


def test_rounds_begin_with_another_contestant_each_in_turns_backwards() -> None:
    settings = SyncSettings(model_size="tiny", rounds=3)
    chosen = with_ideals(parse_contestants("naive,torch_ddp"), same_allocator=False)
    plan = bench_plan(settings, [(each, 2, 1) for each in chosen])
    order = [entry.label for entry in plan.turns()]
    every = ["none", "none (default malloc)", "naive", "torch_ddp"]
    assert order == every + every[1::-1] + every[:1:-1] + every[2:] + every[:2]
    assert [(each.world_size, each.keep_memory) for each in plan.sets] == [(2, True), (2, False)]
    assert plan.world_sizes == (2, 2)
    ideals = [plan.ideal_of(entry).label for entry in plan.entries]
    assert ideals == [every[0], every[1], every[0], every[1]]
    assert from_json(BenchPlan, json.loads(json.dumps(asdict(plan)))) == plan


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


class FakeStore:
    """A `Store` that never waits: what is not there would be waited for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def wait(self, key: str, timeout: object) -> bytes:
        if key not in self.values:
            raise BlockingIOError(key)
        return self.values[key]


def test_the_baton_goes_from_set_to_set() -> None:
    store, owners = FakeStore(), [0, 0, 1, 0]
    zero, one = Baton(store, 0, owners), Baton(store, 1, owners)
    with pytest.raises(BlockingIOError):
        one.take(2)
    zero.take(0)
    zero.hand_on(0)
    zero.take(1)
    with pytest.raises(BlockingIOError):
        one.take(2)
    zero.hand_on(1)
    one.take(2)
    with pytest.raises(BlockingIOError):
        zero.take(3)
    one.hand_on(2)
    zero.take(3)
    zero.hand_on(3)


def test_models_stay_where_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SyncSettings(model_size="tiny")
    need = 3 * 8 * 20 * settings.config.num_params()
    for free, stays in ((2 * need, True), (2 * need - 100, False)):
        monkeypatch.setattr(sync_plan, "available_bytes", lambda free=free: free)
        found = side_by_side(replace(settings, device="cpu"), ranks=3, models=8)
        assert found.side_by_side is stays


def test_nothing_waits_between_the_warm_up_and_the_clock() -> None:
    """What the warm-up leaves to send counts, as what the last step leaves does not."""
    seen = mock.Mock()
    settings = SimpleNamespace(num_warmup=2, num_steps=1, side_by_side=True)
    plan = SimpleNamespace(settings=settings)
    seen.clock.read.return_value = [1.0], [1.0]
    bench = SimpleNamespace(
        entrant=seen.entrant, clock=seen.clock, micro_batches=(), step_s=[], compute_s=[]
    )
    runner: Any = SimpleNamespace(_plan=plan, _benches={"ddp": bench}, _site=seen)
    entry: Any = SimpleNamespace(label="ddp")
    Runner._turn(runner, entry)
    called = [name for name, _, _ in seen.mock_calls]
    assert called[:4] == ["comm.barrier", "entrant.step", "entrant.step", "clock.begin"]
