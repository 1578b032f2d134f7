"""Contestants, sets of ranks and their turns, what fits into memory and time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tyro

from gradsync.commands.bench import sync
from gradsync.commands.bench.contestants import parse_contestants, with_ideals
from gradsync.commands.bench.experiment import from_json
from gradsync.commands.bench.steps import Baton, Runner, my_set
from gradsync.commands.bench.sync_plan import (
    BUDGET_S,
    BenchPlan,
    Room,
    SyncSettings,
    bench_plan,
    duration,
    seconds_of,
    shortened,
)
from gradsync.commands.models.config import PRESETS
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.memory import memory_need
from gradsync.commands.plan.workload import Split, Workload
from gradsync.errors import ConfigError
from gradsync.world import World
from support.bench_results import GB


def room(available: int, ranks: int = 2) -> Room:
    return Room(available=available, leaf_tokens=512, ranks=ranks, busy=2)


def names(text: str) -> list[str]:
    return [each.label for each in parse_contestants(text)]


def test_options_belong_to_the_name_before_them() -> None:
    first, second = parse_contestants("bucketed:bucket_mb=1,collective=backend, torch_ddp")
    assert first.label == "bucketed:bucket_mb=1,collective=backend"
    assert first.options == {"bucket_mb": 1, "collective": "backend"}
    assert (second.label, second.options) == ("torch_ddp", {})
    assert parse_contestants("flat:overlap=false")[0].options == {"overlap": False}


def test_each_setting_of_the_allocator_has_its_ideal() -> None:
    chosen = parse_contestants("naive,torch_ddp,torch_ddp:keep_memory=true")
    both = with_ideals(chosen, same_allocator=False)
    assert [(each.label, each.keep_memory) for each in both] == [
        ("none", True),
        ("none (default malloc)", False),
        ("naive", True),
        ("torch_ddp", False),
        ("torch_ddp:keep_memory=true", True),
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
        ("torch_ddp:bucket_mb=1", "torch_ddp has no option 'bucket_mb'"),
        ("bucketed:bucket_mb", "is not key=value"),
        ("bucketed:bucket_mb=-1", "bucket_mb must be positive"),
        ("bucketed:bucket_mb=abc", "bucket_mb must be a positive, finite number; got 'abc'"),
        ("bucketed:first_bucket_mb=none", "bucket_mb must be a positive, finite number; got None"),
        ("bucketed:bucket_mb=1" + 400 * "0", "bucket_mb must be a positive, finite number"),
        ("bucketed:first_bucket_mb=inf", "first_bucket_mb must be a positive, finite number"),
        ("bucketed:overlap=maybe", "overlap must be true or false; got 'maybe'"),
        ("ddp:bucket_mb=true", "bucket_mb must be a positive, finite number; got True"),
        ("ddp:find_unused_parameters=1", "find_unused_parameters must be true or false; got 1"),
        ("diloco:outer_lr=abc", "outer_lr must be a positive, finite number; got 'abc'"),
        ("local_sgd:inner_steps=abc", "inner_steps must be a whole number, at least 1; got 'abc'"),
        ("local_sgd:inner_steps=0", "inner_steps must be a whole number, at least 1; got 0"),
        ("fsdp:compute_dtype=foo", "compute_dtype must be one of bf16, fp16, fp32; got 'foo'"),
        ("torch_ddp:bucket_cap_mb=abc", "bucket_cap_mb must be a positive, finite number"),
        ("torch_ddp:static_graph=foo", "static_graph must be true or false; got 'foo'"),
        ("none:keep_memory=false,flat", "none always takes part, and has no options"),
        ("naive:keep_memory=3", "must be true or false"),
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
    assert zero.take(0)
    zero.hand_on(0)
    assert zero.take(1)
    with pytest.raises(BlockingIOError):
        one.take(2)
    zero.hand_on(1)
    assert one.take(2)
    with pytest.raises(BlockingIOError):
        zero.take(3)
    one.hand_on(2)
    assert zero.take(3)
    zero.hand_on(3)


def test_a_set_that_gives_up_sends_the_others_home() -> None:
    store, owners = FakeStore(), [0, 1, 0, 1]
    Baton(store, 0, owners).give_up(0)
    one = Baton(store, 1, owners)
    assert not one.take(1)
    assert not one.take(3)


def test_memory_decides_which_size() -> None:
    assert room(10**15).choose("auto") == "2.7b"
    assert room(80 * GB).choose("auto") == "xl"  # larger than the one called 1.3b
    assert room(22 * GB).choose("auto") == "medium"
    mini, four = PRESETS["mini"], room(20 * GB, ranks=4)
    assert four.needed(mini, contestants=8) > 32 * 16 * mini.num_params()
    need = memory_need(
        Workload(model=PRESETS["mini"], micro_batch_size=1, seq_len=512, num_leaves=2, kind="cpu"),
        Split(strategy="ddp", layout=ParallelLayout(dp=2)),
    )
    assert room(0).needed(mini) == 2 * need.total
    assert four.fits(PRESETS["tiny"], contestants=8)
    assert room(20 * GB).choose("small") == "small"
    with pytest.raises(
        ConfigError, match=r"xl: about .* GB for 2 ranks, .* GB short\); 'medium' fits"
    ):
        room(22 * GB).choose("xl")
    for name in ("tiny", "auto"):
        with pytest.raises(ConfigError, match="no size fits"):
            room(10**6).choose(name)


@pytest.mark.parametrize(
    ("flops", "longest", "words", "model"),
    [
        (1e9, "small", [], "tiny"),  # however slow
        (1e11, "small", [], "tiny"),
        (1e12, "small", [], "mini"),
        (1e15, "small", [], "small"),  # what fits into memory
        (1e15, "small", ["--strategies", "all", "--rounds", "1500"], "mini"),
        (1e9, "small", ["--model-size", "small"], "small"),  # asked for
        (1e9, "small", ["--context-length", "1024"], "small"),  # others are too short
    ],
)
def test_a_model_that_nobody_chose_is_done_in_three_minutes(
    flops: float, longest: str, words: list[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(work: Workload, *, ranks_per_host: int) -> float:
        assert ranks_per_host == 2
        return work.model.flops_per_token(work.seq_len) * work.leaf_tokens / flops

    monkeypatch.setattr(sync, "trial_step", trial)
    monkeypatch.setattr(Room, "choose", lambda _, name: name.replace("auto", longest))
    options = tyro.cli(sync.SyncOptions, args=[*words, "--device", "cpu"])
    plan = sync.plan_of(options, World())
    assert plan.settings.model_size == model


@pytest.mark.parametrize(
    ("step_s", "given", "turns", "takes_s"),
    [
        (0.01, {}, (5, 10, 2), 4.52),
        (0.2, {}, (5, 10, 2), 90.4),
        (0.4, {}, (5, 5, 2), 120.8),
        (0.6, {}, (3, 5, 1), 120),
        (0.9, {}, (3, 3, 1), 147.6),
        (2.0, {}, (3, 3, 1), 328),  # not shorter: what it takes is said
        (2.0, {"rounds": 9}, (9, 3, 1), 616),  # asked for
        (0.9, {"num_steps": 4, "num_warmup": 0}, (3, 4, 0), 147.6),
    ],
)
def test_turns_are_shorter_where_steps_are_slow(
    step_s: float, given: dict[str, int], turns: tuple[int, int, int], takes_s: float
) -> None:
    settings = SyncSettings(model_size="tiny", **given)
    chosen = with_ideals(parse_contestants("naive,bucketed,torch_ddp,ring"), same_allocator=False)
    plan = shortened(bench_plan(settings, [(each, 2, 1) for each in chosen]), step_s)
    found = plan.settings
    assert (found.rounds, found.num_steps, found.num_warmup) == turns
    assert plan.takes_s == pytest.approx(takes_s)


@pytest.mark.parametrize(
    ("takes_s", "words"),
    [
        (0, "largest that fits; --model-size takes another"),
        (100, "largest that fits and is done in three minutes; --model-size takes another"),
        (1_000, "smallest; --model-size takes another"),
        (1_000, "3 rounds of 10 steps, since steps are slow here"),
        (1_000, "its steps take about 17 min, with the ranks' start more than three minutes"),
    ],
)
def test_what_a_measurement_takes_is_said_before(takes_s: float, words: str) -> None:
    options = sync.SyncOptions(strategies="naive", dtype="fp32")
    chosen = with_ideals(parse_contestants("naive"), same_allocator=False)
    settings = SyncSettings(model_size="tiny", rounds=3)
    plan = bench_plan(settings, [(each, 2, 1) for each in chosen])
    said = sync._decided(options, replace(plan, takes_s=takes_s), World())
    assert words in "\n".join(said)
    assert ("more than" in said[-1]) == (takes_s > BUDGET_S)


def test_how_long_it_takes() -> None:
    settings = SyncSettings(model_size="tiny", rounds=3, num_steps=4, num_warmup=1)
    chosen = with_ideals(parse_contestants("naive,torch_ddp"), same_allocator=False)
    plan = bench_plan(settings, [(each, 2, 1) for each in chosen])
    steps = 4 * (14 + 3 * 5) + 2 * 4
    assert seconds_of(plan, 2.0) - seconds_of(plan, 0.0) == pytest.approx(steps * 2.0)
    assert [duration(s) for s in (0.2, 40, 170, 4_800)] == ["1 s", "40 s", "3 min", "1 h 20 min"]


def test_nothing_waits_between_the_warm_up_and_the_clock() -> None:
    """What the warm-up leaves to send counts, as what the last step leaves does not."""
    seen = mock.Mock()
    settings = SimpleNamespace(num_warmup=2, num_steps=1, side_by_side=True)
    plan = SimpleNamespace(settings=settings)
    seen.clock.read.return_value = [1.0], [1.0]
    bench = SimpleNamespace(
        entrant=seen.entrant, clock=seen.clock, leaves=(), step_s=[], compute_s=[]
    )
    runner: Any = SimpleNamespace(_plan=plan, _benches={"ddp": bench}, _site=seen)
    entry: Any = SimpleNamespace(label="ddp")
    Runner._turn(runner, entry)
    called = [name for name, _, _ in seen.mock_calls]
    assert called[:4] == ["comm.barrier", "entrant.step", "entrant.step", "clock.begin"]
