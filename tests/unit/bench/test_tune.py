"""`gradsync tune`: what it tries, and when it believes what it measured."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import tyro

from gradsync.commands.bench.experiment import command_of
from gradsync.commands.bench.tune import (
    EXPERIMENT,
    TuneOptions,
    TuneRequest,
    bucket_sizes,
    decide,
    request_of,
    strategies,
)
from gradsync.commands.cli.train import _threads
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.tuned import TunedStrategy
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

MIB = 2**20
NOISE = 0.03
TRIALS = 200
ROUNDS = 12


def decided(
    gains: list[float], seed: int, *, apart: float = 0.0, rounds: int = ROUNDS, skewed: bool = False
) -> dict[str, Any]:
    """Synthetic rounds: each has a speed of its own, each step its noise; the k-th candidate takes
    `1 - gains[k]` of the default's time. `apart`: by how much the two copies differ for good;
    `skewed`: now and then something makes a step much slower, and nothing makes one faster."""
    rng = np.random.default_rng(seed)
    speed = rng.uniform(0.5, 2.0, rounds)

    def steps(factor: float) -> list[float]:
        noise = 1 + rng.exponential(0.2, rounds) if skewed else rng.lognormal(0, NOISE, rounds)
        return list(speed * factor * noise)

    candidates = {f"c{k}": steps(1 - gain) for k, gain in enumerate(gains)}
    return decide(steps(1.0), steps(1.0 + apart), candidates, name="default")


@pytest.mark.parametrize(
    ("candidates", "rounds", "skewed"), [(1, 12, False), (7, 12, False), (1, 12, True)]
)
def test_noise_is_refused(candidates: int, rounds: int, skewed: bool) -> None:
    """At the stated rate: it wins at most one stage in twenty, however many candidates try."""
    found = [decided([0.0] * candidates, s, rounds=rounds, skewed=skewed) for s in range(TRIALS)]
    assert sum(each["winner"] != "default" for each in found) <= 0.05 * TRIALS
    typical = np.mean([judged["ratio"] for each in found for judged in each["judged"]])
    assert typical == pytest.approx(1, abs=0.01)  # no candidate begins with an advantage


def test_a_real_gain_is_taken() -> None:
    """5 % under 3 % of noise, beside three candidates that gain nothing."""
    winners = [decided([0.0, 0.05, 0.0, -0.05], seed)["winner"] for seed in range(100)]
    assert winners.count("c1") >= 85
    assert set(winners) <= {"c1", "default"}


def test_the_fastest_of_several_is_taken() -> None:
    found = decided([0.10, 0.30, 0.20], seed=0)
    assert found["winner"] == "c1"
    assert [each["faster"] for each in found["judged"]] == [True, True, True]
    assert found["words"].startswith("c1 takes 69.")
    slower = decided([-0.2, -0.4], seed=1)
    assert slower["winner"] == "default"
    assert slower["words"].startswith("default stays, nothing is faster beyond the noise")
    assert all(each["low"] > 1 for each in slower["judged"])


def test_what_lies_within_the_copies_difference_is_refused() -> None:
    """The same program twice differs by 12 % here: 10 % prove nothing, however steady they are."""
    steady = [1.0, 2.0, 0.5] * 4
    again = [1.12 * second for second in steady]
    faster = [0.95 * second for second in steady]  # 5 % before the one, 15 % before the other
    found = decide(steady, again, {"c": faster}, name="default")
    assert found["winner"] == "default"
    assert found["judged"][0]["high"] < 1
    assert found["noise"] == pytest.approx(0.12)
    assert "beyond the noise: c takes 89.9 % of the time" in found["words"]
    much = [0.8 * second for second in steady]
    assert decide(steady, again, {"c": much}, name="default")["winner"] == "c"


@pytest.mark.parametrize("promise", ["bitwise", "rounding"])
@pytest.mark.parametrize("hosts", [0, 1, 2])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_candidates_keep_the_promise(promise: str, hosts: int, on_cpu: bool) -> None:
    found = strategies(promise, on_cpu=on_cpu, hosts=hosts)
    assert found[0] == TunedStrategy()
    allowed = {"bitwise"} if promise == "bitwise" else {"bitwise", "rounding"}
    assert {STRATEGIES[each.sync].promise for each in found} <= allowed
    texts = [each.text for each in found]
    assert len(set(texts)) == len(texts)
    shared = on_cpu and hosts == 1
    assert ("invariant:collective=backend" in texts) == shared
    assert ("invariant:reduction=hierarchical" in texts) == (hosts > 1)
    assert ("bucketed" in texts) == (promise == "rounding")


@pytest.mark.parametrize(
    ("sync", "mib", "expected"),
    [
        ("invariant", 500, [2.0, 5.0, 10.0, 50.0, 100.0]),
        ("ddp", 500, [2.0, 5.0, 10.0, 50.0, 100.0]),
        ("invariant", 20, [2.0, 5.0, 10.0]),
        ("invariant", 7, [2.0, 5.0]),
        ("invariant", 1, []),
        ("flat", 500, []),
        ("naive", 500, []),
    ],
)
def test_only_sizes_that_cut_otherwise_are_tried(sync: str, mib: int, expected: Any) -> None:
    winner = TunedStrategy(sync=sync)
    assert bucket_sizes(winner, gradient_bytes=mib * MIB, device="cpu") == expected


def requested(**changes: Any) -> TuneRequest:
    return request_of(TuneOptions(**changes), World())


def test_sizes_are_those_of_the_training_run() -> None:
    """`gradsync train tiny`: 8 micro-batches of 2 x 256 tokens, a vocabulary of bytes."""
    two = requested()
    assert (two.batch_size, two.settings.micro_batches_per_rank, two.settings.tokens) == (8, 4, 256)
    assert (two.settings.config.vocab_size, two.settings.threads) == (257, 1)
    three = requested(world_size=3)
    assert (three.batch_size, three.settings.micro_batches_per_rank) == (6, 3)
    assert requested(batch_size=3).settings.micro_batches_per_rank == 1
    assert requested(batch_size=4).settings.micro_batches_per_rank == 2
    assert requested(micro_batches_per_rank=3).batch_size == 6
    assert msgspec.convert(json.loads(json.dumps(asdict(three))), TuneRequest) == three


def test_threads_are_those_of_the_training_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("os.cpu_count", 64), ("gradsync.runtime.machine.usable_cores", 64)):
        monkeypatch.setattr(name, lambda value=value: value)
    monkeypatch.setattr("gradsync.runtime.machine.cgroup_cores", lambda *_: None)
    assert requested(device="cpu").settings.threads == 1
    assert requested(device="cpu", threads=3).settings.threads == 3
    assert _threads(TrainConfig(sync="auto", device="cpu")) == 1


@pytest.mark.parametrize(
    "options", [TuneOptions(), TuneOptions(model="mini", dtype="fp32", batch_size=2)]
)
def test_the_record_says_what_to_type(options: TuneOptions) -> None:
    words = shlex.split(command_of(replace(options, out="x", as_json=True), EXPERIMENT.command))
    assert words[:2] == ["gradsync", "tune"]
    assert tyro.cli(TuneOptions, args=words[2:]) == options
