"""What `bench memory` measures, refuses and prints."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from bench_tables import memory_table

from gradsync.bench.memory_plan import (
    SHAPES,
    MemoryCase,
    MemoryRun,
    memory_cases,
    print_report,
    row_of,
)
from gradsync.bench.record import from_json
from gradsync.cli import bench_memory, experiment
from gradsync.cli.experiment import command_of
from gradsync.cli.main import main
from gradsync.plan.memory import memory_need
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

CASE = MemoryCase(shape="long", strategy="zero1", checkpointing=True, leaves=3)
ENVIRONMENT = {
    **{"date": "2026-11-21", "accelerator": None, "cpu": "a CPU", "cores": 2},
    **{"load_at_start": 0.1, "torch": "2.13", "threads_per_rank": 1, "backend": "gloo"},
}


def test_every_strategy_is_a_case() -> None:
    cases = list(memory_cases(["long", "wide"], list(STRATEGIES)))
    for shape in ("long", "wide"):
        plain = [c.strategy for c in cases if c == MemoryCase(shape=shape, strategy=c.strategy)]
        assert plain == list(STRATEGIES)
    assert len(set(cases)) == len(cases)
    assert [str(case) for case in memory_cases(["long"], ["fsdp"])] == [
        *("fsdp", "fsdp, checkpointing", "fsdp, 3 leaves")
    ]


def test_a_case_is_divided_as_the_trainer_does_it() -> None:
    assert str(CASE) == "zero1, checkpointing, 3 leaves"
    work = CASE.workload(2, "cpu")
    assert (work.num_leaves, work.leaf_tokens, work.activation_checkpointing) == (6, 512, True)
    assert not CASE.split(2, "cpu").shared_weights
    invariant = MemoryCase(shape="wide", strategy="invariant", tokens=64)
    assert invariant.split(2, "cpu").shared_weights
    assert not invariant.split(2, "cuda").shared_weights
    assert not invariant.split(1, "cpu").shared_weights
    assert invariant.workload(2, "cpu").seq_len == 64
    assert invariant.need(2, "cpu") == memory_need(
        invariant.workload(2, "cpu"), invariant.split(2, "cpu")
    )


def test_runs_travel_as_json() -> None:
    run = MemoryRun(case=CASE, device="cpu", steps=3)
    assert from_json(MemoryRun, json.loads(json.dumps(asdict(run)))) == run


def test_the_table_shows_both() -> None:
    need = CASE.need(2, "cpu").total
    result = {"kind": "cpu", "keeps_memory": True, "peak_bytes": [need // 4, need // 2]}
    row = row_of(CASE, result)
    bare = row_of(CASE, {**result, "keeps_memory": False})
    assert bare.predicted_bytes == need - CASE.need(2, "cpu").slack
    assert (row.predicted_bytes, row.measured_bytes) == (need, need // 2)
    assert sum(row.parts.values()) == need
    stream = io.StringIO()
    print_report([row], ENVIRONMENT, stream)
    assert f"{need / 2**20:,.0f}" in stream.getvalue()
    assert "2.00" in stream.getvalue()
    assert f"{SHAPES['long'].num_params() / 1e6:.1f} M parameters" in stream.getvalue()


def test_the_table_of_a_record() -> None:
    result = {"kind": "cpu", "keeps_memory": True, "peak_bytes": [2**30, 2**29]}
    row = row_of(CASE, result)
    record = {
        "command": "gradsync bench memory --shapes long",
        "environment": {**ENVIRONMENT, "world_size": 2},
        "rows": [asdict(row)],
    }
    _, _, line, _, said = memory_table(record).splitlines()
    need = CASE.need(2, "cpu").total
    numbers = f"{need / 2**20:,.0f} | 1,024 | {need / 2**30:.2f}"
    assert line == f"| `zero1`, checkpointing, 3 leaves | {numbers} |"
    assert said.startswith("`gradsync bench memory --shapes long`: largest size of a rank of 2;")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "long,wid"], "unknown shape 'wid'"),
        (["--strategies", "ddb"], "perhaps you meant 'ddp'"),
        (["--strategies", ","], "name at least one of each"),
        (["--steps", "1"], "--steps must be at least 2; got 1"),
        (["--world-size", "0"], "--world-size must be at least 1; got 0"),
        (["--device", "cudax"], "--device must be one of auto, cpu, cuda"),
        (["--out", "/dev/null/x"], "is no folder"),
    ],
)
def test_requests_that_cannot_be(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "memory", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_ranks_of_a_launcher_are_not_new_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(world_size=2, local_world_size=2)
    monkeypatch.setattr(experiment, "resolve", lambda _: SimpleNamespace(world=world))
    assert main(["bench", "memory"]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_the_command_line_of_a_record() -> None:
    options = bench_memory.MemoryOptions(shapes="long", exact=True, out="somewhere", steps=3)
    expected = "gradsync bench memory --shapes long --steps 3 --exact"
    assert command_of(options, ("bench", "memory")) == expected
