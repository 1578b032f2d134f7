"""`bench sync` at work: what it counts, what it refuses to time, and one whole run of it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gradsync.commands.bench import steps
from gradsync.commands.bench.entrants import BenchSite, Entrant, TorchDdp
from gradsync.commands.bench.meter import StepClock
from gradsync.commands.bench.steps import PeakMemory, check, judge, reference_losses, run_plan
from gradsync.commands.bench.sync_plan import CHECKED, SyncSettings, bench_plan, parse_contestants
from gradsync.commands.models.config import PRESETS, GPTConfig
from gradsync.errors import RunError
from support.fork_server import WITH_RANKS, run_forked
from support.rank_session import open_session

SMALL = {"tiny": GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=2048, block_size=16)}
NUM_PARAMETERS = 11  # embedding, the last norm, and 9 of the one layer
SIZE = 4 * SMALL["tiny"].num_params()
SETTINGS = SyncSettings(model_size="tiny", context_length=16, rounds=2, num_steps=2, num_warmup=0)
BENCH = ("-m", "gradsync", "bench", "sync")
CONTESTANTS = "naive,bucketed:collective=shared_memory,ring,hierarchical,local_sgd,torch_ddp"


def _measured(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    told: list[str] = []
    with (
        patch.dict(PRESETS, SMALL),
        patch.object(steps, "environment", lambda **_: {"told": len(told)}),
        patch.object(steps, "show_progress", lambda place, count, what: told.append(what)),
        patch.object(steps, "say", told.append),
        open_session(rank, world_size, store_path) as world,
    ):
        plan = bench_plan(SETTINGS, parse_contestants(CONTESTANTS), world_size, 1)
        found = run_plan(plan, world)
    assert found["environment"] == {"told": 0}  # before the first piece of work
    if rank == 0:
        assert told[0] == "checking none"
        assert told[len(plan.contestants)] == CHECKED
        assert told[-1] == f"measuring {plan.contestants[2].label}"  # the second round, backwards
    else:
        assert told == []
    return found["contestants"]


def test_what_is_measured_on_two_ranks(pool: Any) -> None:
    """Operations and bytes by formula: W = 2, so a sum sends S; one small message a step."""
    first, second = pool.run(_measured, 2)
    assert first == second
    for ranks in first.values():
        assert [len(turn) for rank in ranks for turn in rank["step_s"]] == [2] * 4
        assert all(0 < c < s for r in ranks for c, s in _pairs(r))
        assert all(rank["memory_bytes"] > SIZE for rank in ranks)
    operations = {name: ranks[0]["operations"] for name, ranks in first.items()}
    assert operations == {
        "none": 0,
        "naive": NUM_PARAMETERS + 1,
        "bucketed:collective=shared_memory": 2,
        "ring": 2 + 1,  # two rounds of messages
        "hierarchical": 2,  # on one host as `bucketed`
        "local_sgd": 2,  # a small message each step; weights and its own message every second
        "torch_ddp": 2,  # it broadcasts buffers before each forward
    }
    sent = {name: ranks[0]["sent_bytes"] / SIZE for name, ranks in first.items()}
    expected = {"none": 0.0, "local_sgd": 0.5}
    expected |= {"bucketed:collective=shared_memory": 0.0, "hierarchical": 0.0}
    assert all(abs(value - expected.get(name, 1.0)) < 0.02 for name, value in sent.items()), sent


def _pairs(rank: dict[str, Any]) -> list[tuple[float, float]]:
    turns = zip(rank["compute_s"], rank["step_s"], strict=True)
    return [pair for turn in turns for pair in zip(*turn, strict=True)]


class Asleep(Entrant):
    """Steps without gradients."""

    def update(self) -> None:
        self.optimizer.zero_grad()


class Apart(TorchDdp):
    """Wraps and then calls the model past the wrapper: the gradients stay the rank's own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.called = self.model


class Shrunk(TorchDdp):
    """Synchronised, but of half of each rank's tokens."""

    def backward(self) -> None:
        every = self.micro_batches
        self.micro_batches = [replace(e, batch=[t[:, :8] for t in e.batch]) for e in every]
        super().backward()
        self.micro_batches = every


def _refused(rank: int, world_size: int, store_path: str) -> list[str]:
    (contestant,) = parse_contestants("torch_ddp")
    messages = []
    with patch.dict(PRESETS, SMALL), open_session(rank, world_size, store_path) as world:
        site = BenchSite(settings=SETTINGS, world=world)
        expected = reference_losses(site, 1)
        for kind in (Asleep, Apart, Shrunk):
            with patch.object(steps, "enter", kind), pytest.raises(RunError) as caught:
                check(contestant, site, expected)
            messages.append(str(caught.value))
    return messages


def test_who_does_not_train_is_not_timed(pool: Any) -> None:
    for message in pool.run(_refused, 2)[0]:
        assert message.startswith("contestant torch_ddp does not train as others do: losses 7.")


def test_lossy_contestants_may_differ_more() -> None:
    expected = [5.0, 4.0, 3.0, 2.0]
    off = [loss * 1.01 for loss in expected]
    fp16, naive, local = parse_contestants("fp16,naive,local_sgd")
    judge(fp16, off, expected)
    judge(local, [loss * 2 for loss in expected], expected)
    with pytest.raises(RunError, match="naive does not train as others do"):
        judge(naive, off, expected)
    for losses in ([2.0, 3.0, 3.0, 4.0], [5.0, 4.0, 3.0, float("nan")]):
        with pytest.raises(RunError, match="local_sgd does not train"):
            judge(local, losses, expected)


def _memory(rank: int, world_size: int, store_path: str) -> int | None:
    tensor = torch.ones(32 * 2**20)  # an older and higher peak
    del tensor
    peak = PeakMemory(on_cuda=False)
    tensor = torch.ones(16 * 2**20)
    del tensor
    return peak.read()


def test_peak_memory_sees_what_has_gone_again(pool: Any) -> None:
    (found,) = pool.run(_memory, 1)
    assert 63 * 2**20 < found < 80 * 2**20


def test_computing_ends_with_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in backward after the last gradient counts as communication."""
    monkeypatch.setattr("gradsync.commands.plan.profile.time.perf_counter", lambda: next(ticks))
    ticks = iter([10.0, 13.0, 16.0, 20.0])
    parameter = torch.nn.Parameter(torch.ones(1))
    clock = StepClock(parameter)
    clock.begin()  # at 10
    parameter.sum().backward()  # its gradient is there at 13
    assert next(ticks) == 16  # DDP waits
    clock.backward_done()
    clock.step_done()  # at 20
    ticks = iter([27.0, 30.0])  # a step in which the watched parameter has no gradient
    clock.backward_done()
    clock.step_done()
    assert clock.read() == ([10, 10], [3, 7])


def test_a_whole_run(tmp_path: Path) -> None:
    """The document is alone on standard output, and the same as the record."""
    words = ["--model-size", "tiny", "--strategies", "naive,torch_ddp"]
    size = ["--context-length", "16", "--rounds", "2", "--num-steps", "1", "--num-warmup", "0"]
    size += ["--threads", "1", "--dtype", "fp32"]
    places = ["--csv", tmp_path / "rows.csv", "--out", tmp_path, "--json"]
    (done,) = run_forked([*BENCH, *words, *size, *places], [WITH_RANKS])
    done.ok()
    document = json.loads(done.stdout)
    rows = {row["contestant"]: row for row in document["rows"]}
    assert list(rows) == ["none", "naive", "torch_ddp"]
    assert rows["naive"]["final_loss"] == pytest.approx(rows["torch_ddp"]["final_loss"], rel=1e-6)
    assert rows["naive"]["ratio"]["count"] == 2
    assert "torch_ddp" in done.stderr
    assert done.stderr.startswith("gradsync: 0 of 9 done, next: ")
    with (tmp_path / "rows.csv").open() as file:
        assert [line["contestant"] for line in csv.DictReader(file)] == list(rows)
    assert json.loads((tmp_path / "record.json").read_text()) == document
    assert list(document)[:3] == ["environment", "command", "benchmark"]
    assert list(document["samples"][0]) == list(rows)


def test_what_a_step_costs_the_host() -> None:
    """Synchronising dispatches no more operations than DDP's, in both loops."""
    contestants = "torch_ddp,bucketed,invariant:loop=user"
    words = ["--host", "--strategies", contestants, "--model-size", "tiny", "--json"]
    words += ["--threads", "1", "--dtype", "fp32"]
    size = ["--rounds", "1", "--num-steps", "1", "--num-warmup", "0"]
    (done,) = run_forked([*BENCH, *words, *size], [WITH_RANKS])
    rows = {row["contestant"]: row for row in json.loads(done.ok().stdout)["rows"]}
    assert list(rows) == ["none", *contestants.split(",")]
    dispatched = {name: row["dispatched"] for name, row in rows.items()}
    assert 0 < dispatched.pop("none") < max(dispatched.values()) == dispatched["torch_ddp"]
    assert {row["tensors"] for row in rows.values()} == {38}
    for row in rows.values():
        times = [milliseconds for _, calls, milliseconds in row["slowest"] if calls]
        assert len(times) == 10
        assert times == sorted(times, reverse=True)


def test_one_rank_stands_beside_plain_torch() -> None:
    words = ["--world-size", "1", "--host", "--strategies", "torch_ddp,naive:loop=user"]
    words += ["--rounds", "1", "--num-steps", "1", "--num-warmup", "0", "--threads", "1"]
    (done,) = run_forked([*BENCH, *words], [WITH_RANKS])
    assert "left out: torch_ddp\n" in done.ok().stderr
    assert "naive:loop=user: the slowest functions of a step of rank 0" in done.stdout
